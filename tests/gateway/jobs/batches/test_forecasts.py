"""Windows, estimates and refusals through the official client, on a real store."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch as ApiBatch
from redis.asyncio import Redis

from gateway.jobs.batches.forecast.forecasts import BatchForecasts, BatchModel
from gateway.jobs.batches.forecast.line_statistics import LineStatistics
from gateway.jobs.batches.input.size import InputSize
from gateway.jobs.batches.model import Batch, BatchStatus
from gateway.jobs.batches.store import BatchStore
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus
from tests.gateway.offline import MODEL, TIERS, OfflineGateway, ShiftedClock, jsonl, line, lines, running_gateway
from tests.waiting import until

CAPACITY = TierCapacity(
    step_s=0.01,
    prefill_tokens_per_s=100.0,
    output_tokens_per_s=50.0,
    whole_prefill_tokens_per_s=400.0,
    whole_output_tokens_per_s=200.0,
    num_ended=1000,
)
WORKER = WorkerStatus(
    "w", (MODEL,), 4096, 1000, 0, tiers={"batch": TierStatus(capacity=CAPACITY)}, left_shares=(0.2, 0.4, 0.8, 1.0)
)


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    async with running_gateway(redis_client, tmp_path, workers=[WORKER]) as gateway:
        yield gateway


def long_lines(count: int) -> list[dict[str, Any]]:
    """Return lines that certainly generate 1,000 tokens each: 5 s each with the whole engine."""
    content = [{"role": "user", "content": "q"}]
    body = {"model": MODEL, "messages": content, "max_tokens": 1000, "ignore_eos": True}
    return [line(f"q{number}", body=body) for number in range(count)]


def said(batch: ApiBatch) -> dict[str, Any]:
    assert batch.model_extra is not None
    extension: dict[str, Any] = batch.model_extra["tidegate"]
    return extension


async def test_a_new_batch_has_an_estimate_at_once(gateway: OfflineGateway) -> None:
    gateway.completions.permits = asyncio.Semaphore(0)
    created = await gateway.submit(long_lines(10))
    estimate = said(created)["estimate"]
    assert estimate["basis"] == "capacity"
    now_s = created.created_at
    assert now_s + 45 <= estimate["earliest"] <= now_s + 60 <= estimate["finish_at"] <= estimate["latest"]
    behind = await gateway.submit(long_lines(10))
    assert said(behind)["estimate"]["finish_at"] >= estimate["finish_at"] + 190


async def test_a_window_that_is_too_short_is_refused_with_the_earliest(gateway: OfflineGateway) -> None:
    file_id = await gateway.upload(jsonl(long_lines(1000)))
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.create(file_id, "1h")
    body: Any = refused.value.body
    assert (body["code"], body["param"]) == ("completion_window_infeasible", "completion_window")
    assert "'104m'" in body["message"], "1,000 times 5 s in 0.9 of the engine, a minute for the files, and some room"
    assert len([batch async for batch in gateway.client.batches.list()]) == 0
    assert not list(gateway.files.data_dir.glob("batches/*"))
    gateway.completions.permits = asyncio.Semaphore(0)
    assert (await gateway.create(file_id, "104m")).status == "validating"


async def test_promises_to_others_count(gateway: OfflineGateway) -> None:
    gateway.completions.permits = asyncio.Semaphore(0)
    file_id = await gateway.upload(jsonl(long_lines(500)))
    await gateway.create(file_id, "1h")
    with pytest.raises(openai.BadRequestError, match="The earliest feasible completion_window is '104m'"):
        await gateway.create(file_id, "1h")
    await gateway.create(file_id, "2h")


async def test_one_batch_fills_all_workers_and_a_little_more(redis_client: Redis, tmp_path: Path) -> None:
    tiers = {"batch": TierStatus(batch_size=32)}
    workers = [replace(WORKER, worker_id=f"w{n}", tiers=tiers) for n in range(10)]
    async with running_gateway(redis_client, tmp_path, workers=workers) as gateway:
        permits = gateway.completions.permits = asyncio.Semaphore(0)
        await gateway.create(await gateway.upload(jsonl(long_lines(600))), "24h", extra_body={"best_effort": True})
        await until(lambda: gateway.completions.running == 400)
        permits.release()
        await until(lambda: gateway.completions.answered.total() == 1 and gateway.completions.running == 400)
        assert gateway.completions.peak == 400, "1.25 for each slot"


@pytest.mark.parametrize("how", [{"extra_body": {"best_effort": True}}, {"metadata": {"x-tidegate-best-effort": "1"}}])
async def test_best_effort_is_taken_in_any_case(gateway: OfflineGateway, how: dict[str, Any]) -> None:
    gateway.completions.permits = asyncio.Semaphore(0)
    created = await gateway.create(await gateway.upload(jsonl(long_lines(1000))), "15m", **how)
    assert said(created)["best_effort"] is True
    await until(lambda: len(gateway.completions.deadlines) == 256)
    assert set(gateway.completions.deadlines) == {None}


async def test_lines_carry_their_part_of_the_deadline(gateway: OfflineGateway) -> None:
    gateway.completions.permits = asyncio.Semaphore(0)
    created = await gateway.create(await gateway.upload(jsonl(long_lines(100))), "1h")
    await until(lambda: len(gateway.completions.deadlines) == 100)
    deadlines = [deadline for deadline in gateway.completions.deadlines if deadline is not None]
    due_s = [deadline.at_ms / 1000 for deadline in deadlines]
    assert due_s == sorted(due_s) and len(set(due_s)) == 100
    assert due_s[-1] < created.expires_at - 60 and due_s[0] < due_s[-1] - 99 * 20
    assert {deadline.urgent_ms for deadline in deadlines} == {450_000}


async def test_a_running_batch_says_its_pace_and_its_cost(gateway: OfflineGateway) -> None:
    permits = gateway.completions.permits = asyncio.Semaphore(0)
    created = await gateway.submit(lines(60))
    assert said(created)["progress"] is None and said(created)["usage"] == {"engine_s": 0.0}
    for _ in range(30):
        permits.release()
    await gateway.answered(created.id, 30)
    permits.release()
    async with asyncio.timeout(30):
        while (progress := said(await gateway.client.batches.retrieve(created.id))["progress"]) is None:
            await asyncio.sleep(0.005)
    assert progress["lines_per_s"] > 0 and progress["tokens_per_s"] > 0 and progress["eta_s"] >= 0
    for _ in range(29):
        permits.release()
    batch = await gateway.ended(created.id)
    assert said(batch)["usage"] == {"engine_s": 0.09} and said(batch)["estimate"] is None
    assert all("tidegate" not in entry["response"]["body"] for entry in await gateway.read(batch.output_file_id))


async def test_an_estimate_says_what_a_batch_would_take(gateway: OfflineGateway) -> None:
    size = {"model": MODEL, "lines": 1000, "prompt_bytes": 0, "min_output": 10**6, "max_output": 10**6, "unlimited": 0}
    asked = {"endpoint": "/v1/chat/completions", "completion_window": "1h", **size}
    answer = (await gateway.http.post("/v1/batches/estimate", json=asked)).json()
    assert (answer["object"], answer["feasible"], answer["earliest_window"]) == ("batch.estimate", False, "103m")
    assert answer["becomes_urgent"] is True and answer["interactive"][0]["max_slowdown"] == 1.25
    endless = asked | {"completion_window": "30d", "min_output": 10**9, "max_output": 10**9}
    answer = (await gateway.http.post("/v1/batches/estimate", json=endless)).json()
    assert (answer["feasible"], answer["earliest_window"]) == (False, None), "no window is long enough"
    bad = await gateway.http.post("/v1/batches/estimate", json={**asked, "lines": 0})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "lines"


async def test_batches_that_are_due_at_the_same_time_wait_for_each_other(redis_client: Redis) -> None:
    store, clock = BatchStore(redis_client), ShiftedClock()
    now_s = clock.wall_ms() // 1000
    size = InputSize(lines=10, choices=10, min_output=10_000, max_output=10_000, prompt_bytes=400, distinct_bytes=400)
    status, endpoint = BatchStatus.IN_PROGRESS, "/v1/completions"
    twins = [Batch(f"batch_{n}", endpoint, "f", "1h", status, now_s, now_s + 3600, size=size, total=10) for n in (1, 2)]
    for twin in twins:
        await store.create(twin)
    statistics = LineStatistics(redis_client, clock)
    model = BatchModel("m", TIERS[TIERS.batch_tier], [WORKER])
    forecasts = BatchForecasts(store, statistics, lambda _: model, clock)
    for twin in twins:
        times = await forecasts.line_times(twin)
        assert times.sooner_s == pytest.approx(10 * times.line_s)


async def test_batches_of_another_model_do_not_wait_for_each_other(redis_client: Redis) -> None:
    store, clock = BatchStore(redis_client), ShiftedClock()
    now_s = clock.wall_ms() // 1000
    status, tier = BatchStatus.IN_PROGRESS, TIERS[TIERS.batch_tier]
    kind: dict[str, Any] = {"lines": 10, "choices": 10, "min_output": 10_000, "max_output": 10_000}
    sizes = [InputSize(model=model, prompt_bytes=400, distinct_bytes=400, **kind) for model in ("a", "b")]
    batches = [
        Batch(f"batch_{size.model}", "/v1/completions", "f", "1h", status, now_s, now_s + 3600, size=size, total=10)
        for size in sizes
    ]
    for batch in batches:
        await store.create(batch)
    statistics = LineStatistics(redis_client, clock)
    forecasts = BatchForecasts(store, statistics, lambda name: BatchModel(name or "a", tier, [WORKER]), clock)
    for batch in batches:
        times = await forecasts.line_times(batch)
        assert times.line_s > 0 == times.sooner_s
    due, num_batches = await forecasts.due_work("a")
    assert len(due) == num_batches == 1


async def test_batches_that_will_miss_their_window_are_counted(
    gateway: OfflineGateway, redis_client: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.jobs.batches.maintenance.LATE_S", 0.0)
    monkeypatch.setattr("gateway.jobs.batches.maintenance.SWEEPER_TICK_S", 0.01)
    gateway.completions.permits = asyncio.Semaphore(0)
    file_id = await gateway.upload(jsonl(long_lines(200)))  # 1,000 s with the whole engine, 4,000 s with what bulk gets
    await gateway.create(file_id, "30m")
    await gateway.create(file_id, "24h")
    await gateway.create(file_id, "30m", extra_body={"best_effort": True})
    async with running_gateway(redis_client, tmp_path / "other", workers=[WORKER]) as other:
        await until(
            lambda: other.batches.forecasts.num_late == 1
        )  # of all gateways, and not the later or the modest one
    gateway.clock.shift_s = 86_400 - 3600  # the other one is late now, too
    async with running_gateway(redis_client, tmp_path / "later", workers=[WORKER], clock=gateway.clock) as later:
        await until(lambda: later.batches.forecasts.num_late == 1)
        page = await later.client.batches.list()
        late = [batch for batch in page.data if batch.status == "in_progress"]
        assert [batch.completion_window for batch in late] == ["24h"], "those that are over are not late any more"
