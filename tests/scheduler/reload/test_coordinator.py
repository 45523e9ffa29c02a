"""Changes of the tiers: in force on all processes of a store, also on those that start."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from scheduler.reload import coordinator
from scheduler.reload.coordinator import Applied
from scheduler.reload.store import TierDocument, TierStore
from scheduler.store.keys import Keys
from tests.scheduler.reload.parts import Part, Start, document, write
from tests.waiting import until


async def test_a_change_returns_after_all_parts_have_made_it(start: Start) -> None:
    parts = [await start(name) for name in ("gateway", "worker 1", "worker 2")]
    outcome = await parts[0].changes.change(document(chat=7, bulk=8, extra=9), "test")
    assert isinstance(outcome, Applied)
    assert outcome.changed
    assert outcome.parts == ("gateway", "worker 1", "worker 2")
    assert outcome.in_force.source == "test"
    assert [part.limits for part in parts] == [{"chat": 7, "bulk": 8, "extra": 9}] * 3
    assert {part.generation for part in parts} == {outcome.in_force.generation}


def changed_s(path: Path, seconds: float) -> None:
    """Let the file look as if it had been changed `seconds` from now."""
    os.utime(path, (time.time() + seconds,) * 2)


async def test_a_part_that_starts_with_a_newer_file_offers_it(start: Start, path: Path) -> None:
    old = await start("gateway")
    write(path, document(chat=5, bulk=6))
    changed_s(path, 60)
    restarted = await start("worker")
    assert restarted.limits == old.limits == {"chat": 1, "bulk": 2}
    await restarted.changes.offer_file()
    assert restarted.limits == old.limits == {"chat": 5, "bulk": 6}
    assert old.follower.in_force.source == str(path)


@pytest.mark.parametrize(
    ("seconds", "limits"), [(-60, {"chat": 5, "bulk": 6}), (60, {"chat": 1, "bulk": 2})], ids=["older", "known"]
)
async def test_an_older_or_known_file_leaves_a_change_at_run_time_in_force(
    start: Start, path: Path, seconds: float, limits: dict[str, int]
) -> None:
    first = await start("gateway")
    await first.changes.change(document(chat=7, bulk=8), "POST")
    write(path, document(**limits))
    changed_s(path, seconds)
    restarted = await start("worker")
    await restarted.changes.offer_file()
    assert restarted.limits == first.limits == {"chat": 7, "bulk": 8}


async def test_a_newer_file_is_offered_again_until_nothing_needs_the_old_tiers(
    start: Start, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "OFFER_S", 0.001)
    old = await start("gateway")
    write(path, document(chat=5, bulk=6))
    changed_s(path, 60)
    restarted = await start("worker")
    old.consumer.objects = "not now"
    offering = asyncio.create_task(restarted.changes.offer_file())
    await until(lambda: old.consumer.asked >= 2)
    old.consumer.objects = ""
    await offering
    assert restarted.limits == old.limits == {"chat": 5, "bulk": 6}


async def test_tiers_in_force_that_cannot_be_read_leave_a_parts_own_until_a_change(
    start: Start, redis_client: Redis
) -> None:
    first = await start("gateway")
    key = Keys.of(redis_client).tiers
    await redis_client.hset(key, "in_force", b"\x81")
    second = await start("worker")
    assert first.limits == second.limits == {"chat": 1, "bulk": 2}
    assert await redis_client.hget(key, "in_force") == b"\x81", "another version's parts may use it"
    assert isinstance(await second.changes.change(document(chat=7, bulk=8), "POST"), Applied)
    assert first.limits == second.limits == {"chat": 7, "bulk": 8}


async def test_two_changes_at_once_are_made_one_after_the_other(start: Start, path: Path) -> None:
    first, second = await start("a"), await start("b")
    write(path, document(chat=5, bulk=6))
    same = await asyncio.gather(first.changes.reload(), second.changes.reload())
    assert sorted(o.changed for o in same if isinstance(o, Applied)) == [False, True]
    others = await asyncio.gather(
        first.changes.change(document(chat=1, bulk=1), "a"), second.changes.change(document(chat=2, bulk=2), "b")
    )
    applied = [outcome.in_force for outcome in others if isinstance(outcome, Applied)]
    assert len(applied) == 2
    newest = max(applied, key=lambda in_force: in_force.generation)
    limit = {"a": 1, "b": 2}[newest.source]
    await until(lambda: first.limits == second.limits == {"chat": limit, "bulk": limit})
    assert first.generation == second.generation == newest.generation


async def test_a_change_made_just_before_by_another_part_is_not_made_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see that it is not in force yet. The slower one proposes it after the other has made it."""
    first, second = await start("a"), await start("b")
    propose = TierStore.propose

    async def overtaken(store: TierStore, *args: Any) -> TierDocument | None:
        monkeypatch.setattr(TierStore, "propose", propose)
        assert isinstance(await first.changes.change(document(chat=5, bulk=6), "a"), Applied)
        return await propose(store, *args)

    monkeypatch.setattr(TierStore, "propose", overtaken)
    outcome = await second.changes.change(document(chat=5, bulk=6), "b")
    assert isinstance(outcome, Applied) and not outcome.changed
    assert outcome.in_force.source == "a" and first.consumer.times == second.consumer.times == 1
    assert isinstance(await second.changes.change(document(chat=7, bulk=7), "b"), Applied), "nothing is left proposed"


# -- starting ------------------------------------------------------------------------------------------------------


async def test_a_part_that_starts_beside_others_takes_their_tiers(start: Start, tmp_path: Path) -> None:
    first = await start("a")
    await first.changes.change(document(chat=7, bulk=7), "test")
    late = await start("b", write(tmp_path / "own.yaml", document(chat=3, bulk=3)))
    assert late.limits == {"chat": 7, "bulk": 7}
    assert late.follower.in_force.source == "test"


async def test_the_first_part_to_start_uses_its_own_file(start: Start, redis_client: Redis, path: Path) -> None:
    async with Part(redis_client, "of yesterday", path, {}).follower:
        pass
    async with (yesterday := Part(redis_client, "of yesterday", path, {})).follower:
        await yesterday.changes.change(document(chat=7, bulk=7), "test")
    part = await start("of today")
    assert part.limits == {"chat": 1, "bulk": 2}
    assert part.follower.in_force.source == str(path)
    assert part.generation > yesterday.generation


async def test_parts_that_start_together_agree(start: Start, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.yaml", document(chat=i, bulk=i)) for i in range(1, 6)]
    parts = await asyncio.gather(*(start(f"part {i}", path) for i, path in enumerate(files)))
    await until(lambda: len({part.generation for part in parts}) == 1)
    assert len({part.limits["chat"] for part in parts}) == 1


async def test_tiers_that_cannot_be_used_here_are_logged_and_ignored(
    start: Start, redis_client: Redis, path: Path
) -> None:
    first = await start("a")
    await first.changes.change(document(chat=7), "test")
    late = Part(redis_client, "b", path, {})
    late.consumer.objects = "A key names 'bulk'."
    with capture_logs() as logs:
        async with late.follower:
            assert late.limits == {"chat": 1, "bulk": 2}
            assert [f.generation for f in await late.store.followers() if f.part == "b"] == [0]
    assert {"A key names 'bulk'."} == {line["reason"] for line in logs if "reason" in line}
