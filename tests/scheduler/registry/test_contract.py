"""The contract of worker registries: one suite, run in memory and on a real server."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import structlog
from redis.asyncio import Redis

from scheduler.clock import SystemClock
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.registry.worker_status import Beat, TierStatus, WorkerStart, WorkerStatus
from scheduler.store import connection, keys
from scheduler.store.keys import Keys
from tests.waiting import until

TTL_S = 0.25


@pytest.fixture(params=["memory", "redis"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[WorkerRegistry]:
    if request.param == "memory":
        yield MemoryWorkerRegistry(SystemClock(), ttl_s=TTL_S)
        return
    client = connection.connect(request.getfixturevalue("valkey_url"))
    yield RedisWorkerRegistry(client, ttl_s=TTL_S)
    await client.aclose()


def status(worker_id: str, running: int = 0) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker_id,
        model_names=("demo", "alias"),
        max_model_len=512,
        vocab_size=1024,
        started_ms=1_700_000_000_000,
        eos_token_ids=(0, 3),
        device="cpu",
        tiers={"realtime": TierStatus(queued=1, running=running, finished_per_s=2.5)},
    )


async def test_announced_workers_are_listed_by_id_with_their_status(registry: WorkerRegistry) -> None:
    await registry.announce(status("w2"))
    await registry.announce(status("w1"))
    assert await registry.workers() == [status("w1"), status("w2")]


async def test_beats_are_of_every_announced_worker(registry: WorkerRegistry) -> None:
    assert await registry.beats() == {}
    await registry.announce(replace(status("w2"), at_ms=7, batch_items=4))
    await registry.announce(replace(status("w1"), at_ms=1))
    await registry.announce(replace(status("w1"), at_ms=2))
    assert await registry.beats() == {"w1": Beat(2), "w2": Beat(7, 4)}
    await registry.withdraw("w2")
    assert await registry.beats() == {"w1": Beat(2)}


async def test_the_state_of_the_controllers_is_kept_too(registry: WorkerRegistry) -> None:
    await registry.announce(status("w1"), '{"tiers": {"ünï": 1}}')
    await registry.announce(status("w2"))
    assert await registry.sla() == {"w1": '{"tiers": {"ünï": 1}}', "w2": "{}"}
    await registry.withdraw("w1")
    assert await registry.sla() == {"w2": "{}"}


async def test_an_announcement_says_which_process_announced_before_under_the_same_id(registry: WorkerRegistry) -> None:
    first, second = replace(status("w1"), incarnation="1-a"), replace(status("w1"), incarnation="2-b")
    assert await registry.announce(first) == ""
    assert await registry.announce(second) == "1-a"
    assert await registry.announce(second) == "2-b"
    assert await registry.workers() == [second]


async def test_a_worker_that_withdraws_is_gone_at_once(registry: WorkerRegistry) -> None:
    await registry.announce(status("w1"))
    await registry.withdraw("w1")
    await registry.withdraw("unknown")
    assert await registry.workers() == []


async def test_a_silent_worker_is_lost_once_and_one_that_has_withdrawn_is_not(registry: WorkerRegistry) -> None:
    assert await registry.num_lost() == 0
    await registry.announce(status("silent"))
    await registry.announce(status("stopped"))
    await registry.withdraw("stopped")
    assert not await registry.remove_silent("stopped"), "whoever watched it sees no more beats of it either"
    assert [await registry.remove_silent("silent") for _who_notices in range(3)] == [True, False, False]
    assert await registry.workers() == [] and await registry.num_lost() == 1


async def test_a_silent_worker_is_gone_after_the_ttl(registry: WorkerRegistry) -> None:
    await registry.announce(status("silent"))

    async def only_the_living() -> bool:
        await registry.announce(status("alive"))
        return await registry.workers() == [status("alive")]

    assert {w.worker_id for w in await registry.workers()} == {"silent"}
    await until(only_the_living)


async def test_what_workers_do_at_their_start_is_known_until_they_have_started(registry: WorkerRegistry) -> None:
    assert await registry.starting() == []
    await registry.announce_start(WorkerStart("w2", "loading the model", 1.5))
    await registry.announce_start(WorkerStart("w1", "loading PyTorch", 0.5))
    await registry.announce_start(WorkerStart("w2", "loading the model", 2.5, 0.25))
    expected = [WorkerStart("w1", "loading PyTorch", 0.5), WorkerStart("w2", "loading the model", 2.5, 0.25)]
    assert await registry.starting() == expected
    assert await registry.workers() == [], "they do not serve yet"
    await registry.withdraw_start("w1")
    await registry.withdraw_start("unknown")
    assert await registry.starting() == expected[1:]


async def test_a_worker_that_dies_at_its_start_is_forgotten(
    registry: WorkerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "START_TTL_S", 0.05)
    await registry.announce_start(WorkerStart("w1", "loading the model", 1.0))

    async def is_forgotten() -> bool:
        return await registry.starting() == []

    await until(is_forgotten)


async def test_a_status_that_cannot_be_read_is_skipped_counted_and_logged_once(redis_client: Redis) -> None:
    registry = RedisWorkerRegistry(redis_client)
    await registry.announce(status("w1"))
    await registry.announce(status("w2"))
    await redis_client.hset(Keys.of(redis_client).worker + "w1", "status", b"\x81\xa9worker_id\x01")
    start = WorkerStart("w3", "loading the model", 1.0)
    await registry.announce_start(start)
    await registry.announce_start(WorkerStart("w4", "loading the model", 1.0))
    await redis_client.set(Keys.of(redis_client).start + "w4", b"\xc1")
    with structlog.testing.capture_logs() as logs:
        assert await registry.workers() == await registry.workers() == [status("w2")]
    assert registry.num_unreadable == len(logs) == 1 and logs[0]["worker"] == "w1"
    assert await registry.starting() == [start]
    await registry.withdraw("w1")
    await registry.workers()
    assert registry.num_unreadable == 0


async def test_the_beats_of_many_workers_are_two_commands(redis_client: Redis) -> None:
    registry = RedisWorkerRegistry(redis_client)
    for number in range(50):
        await registry.announce(replace(status(f"w{number}"), at_ms=number))
    await redis_client.config_resetstat()
    assert len(await registry.beats()) == 50
    commands = await redis_client.info("commandstats")
    assert {name: stats["calls"] for name, stats in commands.items() if "config" not in name} == {
        "cmdstat_smembers": 1,
        "cmdstat_hgetall": 1,
    }


async def test_a_dead_worker_leaves_nothing(redis_client: Redis) -> None:
    registry = RedisWorkerRegistry(redis_client)
    await registry.announce(status("w1"))
    await redis_client.delete(Keys.of(redis_client).worker + "w1")  # expired
    assert await registry.beats() == {"w1": Beat(0)}, "who watches it sees that it does not change"
    assert await registry.workers() == []
    assert await redis_client.keys() == []


async def test_long_reports_take_little_of_the_store(redis_client: Redis) -> None:
    report = json.dumps(
        {"decisions": [{"ago_s": number / 7, "tier": "bulk", "reason": "why"} for number in range(200)]}
    )
    registry = RedisWorkerRegistry(redis_client)
    await registry.announce(status("w1"), report)
    assert await redis_client.hstrlen(Keys.of(redis_client).worker + "w1", "sla") < len(report) / 4
    assert await registry.sla() == {"w1": report}
