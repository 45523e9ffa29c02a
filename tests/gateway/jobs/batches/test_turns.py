"""Which batches run while there are more than a gateway runs at the same time."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.jobs.batches.model import BatchStatus
from gateway.jobs.batches.turns import UnfinishedBatch, next_turns
from tests.gateway.offline import MODEL, jsonl, line, lines, running_gateway
from tests.waiting import until


def unfinished(name: str, owner: str, due: int, best_effort: bool = False) -> UnfinishedBatch:
    return UnfinishedBatch(name, BatchStatus.IN_PROGRESS, owner, best_effort, due, "m", None)


def test_batches_that_are_due_first_have_half_of_the_turns_and_keys_the_others() -> None:
    many = [unfinished(f"a{n}", "a", n) for n in range(9)]
    late = [unfinished("b", "b", 50), unfinished("c", "c", 60, best_effort=True)]
    assert next_turns([*late, *many], 4) == ["a0", "a1", "b", "c"]


def test_a_promise_does_not_wait_for_best_effort() -> None:
    best_effort = [unfinished(f"{n}", f"key {n}", 1, best_effort=True) for n in range(9)]
    assert next_turns([*best_effort, unfinished("promised", "key 0", 99)], 1) == ["promised"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=20), st.integers(1, 8))
def test_no_turn_is_left_unused_and_the_first_of_the_promised_has_one(
    entries: list[tuple[str, int, bool]], limit: int
) -> None:
    batches = [unfinished(f"{n}", *entry) for n, entry in enumerate(entries)]
    turns = next_turns(batches, limit)
    assert len(set(turns)) == len(turns) == min(limit, len(batches))
    promised = [batch for batch in batches if not batch.best_effort]
    if promised:
        assert min(promised, key=lambda batch: batch.expires_at).id in turns


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.batches.maintenance.MAX_RUNS", 2)
    monkeypatch.setattr("gateway.jobs.batches.maintenance.ADOPT_S", 0.02)


@pytest.mark.usefixtures("few_runs")
async def test_a_promised_batch_takes_the_turn_of_best_effort(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path) as gateway:
        permits = gateway.completions.permits = asyncio.Semaphore(0)
        file_id = await gateway.upload(jsonl(lines(3)))
        modest = [await gateway.create(file_id, "1h", extra_body={"best_effort": True}) for _ in range(2)]
        await until(lambda: gateway.completions.running == 6)
        promised = await gateway.submit([line("promised")])
        await until(lambda: gateway.completions.calls["promised"] == 1)
        for _ in range(100):
            permits.release()
        for batch in (promised, *modest):
            ended = await gateway.ended(batch.id)
            assert ended.status == "completed" and ended.request_counts is not None
            assert ended.request_counts.completed == ended.request_counts.total


@pytest.mark.usefixtures("few_runs")
async def test_a_batch_waits_while_no_gateway_serves_its_model(
    redis_client: Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a mistake in a file of models, or on the gateway that has the new file last: its lines must not fail."""
    async with running_gateway(redis_client, tmp_path) as gateway:
        gateway.completions.permits = asyncio.Semaphore(0)
        waits, queued = await gateway.submit(lines(5)), await gateway.submit(lines(2))
        await until(lambda: gateway.completions.running == 7)
    async with running_gateway(redis_client, tmp_path, served_model_name=["another"]) as gateway:
        await until(lambda: sum("is not served here" in message for message in caplog.messages) == 2)
        body = {"model": "another", "messages": [{"role": "user", "content": "own"}]}
        own = await gateway.submit([line("own", body=body)])
        assert (await gateway.ended(own.id)).status == "completed"
        assert sorted(gateway.completions.answered) == ["own"]
        cancelled = await gateway.client.batches.cancel(queued.id)
        assert (await gateway.ended(cancelled.id)).status == "cancelled", "what needs no lines goes on"
    assert f"batch {waits.id} waits: its model '{MODEL}' is not served here" in caplog.text
    assert len([m for m in caplog.messages if waits.id in m and "is not served here" in m]) == 1, "said once"
    async with running_gateway(redis_client, tmp_path) as gateway:
        ended = await gateway.ended(waits.id)
    assert ended.request_counts is not None
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("completed", 5, 0)
