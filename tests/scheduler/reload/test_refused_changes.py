"""Changes of the tiers that are made on no process of a store, because of an objection or of silence."""

from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from scheduler.config import TierConfigError, TierSet
from scheduler.reload import coordinator
from scheduler.reload.coordinator import Applied, Late, Refused
from scheduler.reload.store import Follower
from scheduler.store.keys import Keys
from tests.scheduler.reload.parts import Start, document


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


async def test_a_part_that_is_silent_is_named_and_nothing_changes(
    start: Start, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = await start("a")
    await part.store.report(Follower("worker 7", part.generation))
    report, looked_at = part.store.report, part.generation

    async def note(follower: Follower) -> None:
        nonlocal looked_at
        await report(follower)
        looked_at = max(looked_at, follower.looked_at)

    monkeypatch.setattr(part.store, "report", note)
    # The time is over as soon as all have voted but the one that is silent.
    before, timeout_s = looked_at, coordinator.TIMEOUT_S
    monkeypatch.setattr(part.changes._clock, "now", lambda: 0.0 if looked_at == before else 2 * timeout_s)
    assert await part.changes.change(document(chat=9, bulk=9), "test") == Late(("worker 7",), in_force=False)
    assert part.limits == {"chat": 1, "bulk": 2}
    assert not await redis_client.exists(Keys.of(redis_client).tiers_proposed), "the way is free for the next change"
    await part.store.leave("worker 7")
    assert isinstance(await part.changes.change(document(chat=9, bulk=9), "test"), Applied)
