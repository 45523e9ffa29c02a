"""Changes of the tiers: on all processes of a store or on none."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis.asyncio import Redis
from structlog.testing import capture_logs

from scheduler.clock import SystemClock
from scheduler.config import TierConfigError, TierSet, parse_tiers
from scheduler.reload import coordinator
from scheduler.reload.coordinator import Applied, Late, Refused, TierChanges
from scheduler.reload.follower import TierFollower
from scheduler.reload.store import Follower, TierDocument, TierStore
from scheduler.store.keys import Keys
from tests.waiting import until


def document(**limits: int) -> dict[str, Any]:
    """Return a tiers document with these queue limits."""
    tiers = {name: {"priority": i, "queue_limit": limit} for i, (name, limit) in enumerate(limits.items())}
    return {"default_tier": next(iter(limits)), "batch_tier": next(iter(limits)), "tiers": tiers}


class Recorder:
    """A consumer that records its tiers. `objects` is its objection to all other tiers."""

    def __init__(self, tiers: TierSet) -> None:
        self.tiers = tiers
        self.times = 0
        self.objects = ""
        self.asked = 0

    def objection(self, tiers: TierSet) -> str:
        self.asked += 1
        return self.objects

    def reconfigure(self, tiers: TierSet) -> None:
        self.tiers = tiers
        self.times += 1


class Part:
    """The objects of one process."""

    def __init__(self, redis: Redis, name: str, path: Path, depths: Mapping[str, int]) -> None:
        tiers = parse_tiers(yaml.safe_load(path.read_text()))
        self.consumer = Recorder(tiers)
        self.store = TierStore(redis)
        self.follower = TierFollower(self.store, self.consumer, name, tiers, path, SystemClock())
        self.changes = TierChanges(self.store, self.follower, self._depths, path, SystemClock())
        self.waiting = depths

    async def _depths(self, tiers: Sequence[str]) -> Mapping[str, int]:
        return {tier: self.waiting.get(tier, 0) for tier in tiers}

    @property
    def limits(self) -> dict[str, int]:
        return {name: tier.queue_limit for name, tier in self.consumer.tiers.tiers.items()}

    @property
    def generation(self) -> int:
        return self.follower.in_force.generation


Start = Callable[..., Awaitable[Part]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiers.yaml", document(chat=1, bulk=2))


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
async def start(redis_client: Redis, path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_part(name: str, own: Path = path, **depths: int) -> Part:
            part = Part(redis_client, name, own, depths)
            await stack.enter_async_context(part.follower)
            return part

        yield start_part


# -- in force everywhere -------------------------------------------------------------------------------------------


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


# -- refused everywhere --------------------------------------------------------------------------------------------


async def test_an_invalid_document_is_not_proposed(start: Start, redis_client: Redis) -> None:
    part = await start("a")
    bad = {"default_tier": "chat", "batch_tier": "chat", "tiers": {"chat": {"priority": 1, "floor": 2}}}
    with pytest.raises(TierConfigError, match=r"tiers\.chat\.floor") as refusal:
        await part.changes.change(bad, "x")
    assert refusal.value.key == "tiers.chat.floor"
    with pytest.raises(TierConfigError, match="64 bits"):
        await part.changes.change(document(chat=2**70), "x")
    assert not await redis_client.exists(Keys.of(redis_client).tiers_proposed)
    assert part.consumer.times == 0


async def test_one_objection_keeps_the_old_tiers_in_force_everywhere(start: Start) -> None:
    first, second = await start("a"), await start("b")
    generation = first.generation
    second.consumer.objects = "It is needed."
    assert await first.changes.change(document(chat=9, bulk=9), "test") == Refused("b: It is needed.")
    assert (first.limits, second.limits) == ({"chat": 1, "bulk": 2}, {"chat": 1, "bulk": 2})
    second.consumer.objects = ""
    assert isinstance(await first.changes.change(document(chat=9, bulk=9), "test"), Applied)
    assert first.generation > generation


async def test_a_tier_with_requests_in_its_queue_stays(start: Start) -> None:
    part = await start("a", bulk=3)
    outcome = await part.changes.change(document(chat=1), "test")
    assert outcome == Refused("The tier 'bulk' cannot be removed: 3 requests wait in its queue.")
    assert part.limits == {"chat": 1, "bulk": 2}
    part.waiting = {"chat": 3}
    assert isinstance(await part.changes.change(document(chat=1), "test"), Applied)
    assert part.limits == {"chat": 1}


async def test_a_tier_that_gets_a_request_while_it_is_removed_comes_back(start: Start) -> None:
    part = await start("a")
    use, part.consumer.reconfigure = part.consumer.reconfigure, lambda tiers: None  # type: ignore[method-assign]

    def fill(tiers: TierSet) -> None:
        part.waiting = {"bulk": 1}
        use(tiers)

    part.consumer.reconfigure = fill  # type: ignore[method-assign]
    outcome = await part.changes.change(document(chat=1), "test")
    assert outcome == Refused("The tier 'bulk' cannot be removed: 1 request waits in its queue.")
    assert part.limits == {"chat": 1, "bulk": 2}


async def test_an_invalid_file_is_logged_and_ignored(start: Start, path: Path) -> None:
    part = await start("a")
    path.write_text("tiers: [")
    with capture_logs() as logs:
        await part.changes.reload_on_signal()
        with pytest.raises(TierConfigError):
            await part.changes.change({}, "test")
        part.waiting = {"bulk": 1}
        await part.changes.change(document(chat=1), "test")
    reasons = [line["reason"] for line in logs if line["event"] == "the tiers are refused; the old ones stay in force"]
    assert [any(text in r for r in reasons) for text in ("not YAML", "default_tier", "1 request waits")] == [True] * 3
    assert part.limits == {"chat": 1, "bulk": 2}


# -- silent parts --------------------------------------------------------------------------------------------------


async def test_a_part_that_is_silent_is_named_and_nothing_changes(
    start: Start, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "TIMEOUT_S", 0.2)
    part = await start("a")
    await part.store.report(Follower("worker 7", part.generation))
    assert await part.changes.change(document(chat=9, bulk=9), "test") == Late(("worker 7",), in_force=False)
    assert part.limits == {"chat": 1, "bulk": 2}
    assert not await redis_client.exists(Keys.of(redis_client).tiers_proposed), "the way is free for the next change"
    await part.store.leave("worker 7")
    assert isinstance(await part.changes.change(document(chat=9, bulk=9), "test"), Applied)


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
