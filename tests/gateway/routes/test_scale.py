"""GET /admin/scale and its metric: they tell what an autoscaler needs, and hold while the store does not answer."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from tests.gateway.offline import ShiftedClock
from tests.gateway.routes.test_overview import CHAT
from tests.gateway.stand import Stand, running_stand
from tests.waiting import until


async def scale_of(stand: Stand) -> dict[str, Any]:
    found: dict[str, Any] = (await stand.http.get("/admin/scale")).json()
    return found


def wanted_in(metrics: str) -> list[float]:
    return [float(line.split()[1]) for line in metrics.splitlines() if line.startswith("tidegate_workers_wanted{")]


async def test_work_that_waits_wants_a_worker() -> None:
    async with running_stand() as stand:
        idle = await scale_of(stand)
        stand.worker.claims = False
        asking = asyncio.create_task(stand.post("/v1/chat/completions", {**CHAT, "service_tier": "flex"}))
        await until(lambda: stand.waiting == 1)
        found: dict[str, Any] = {}

        async def wants_one() -> bool:  # the gateway reads the queues once a second
            found.update(await scale_of(stand))
            return bool(found["workers_wanted"])

        await until(wants_one)
        assert wanted_in((await stand.http.get("/metrics")).text) == [1.0]
        stand.worker.claim_again()
        await asking
    assert (idle["workers_wanted"], idle["workers_serving"], idle["reason"]) == (0, 1, "there is nothing to do")
    assert (found["workers_wanted"], found["workers_serving"]) == (1, 1)


async def test_a_worker_that_has_just_come_serves() -> None:
    async with running_stand() as stand:
        stand.gateway.models.main.client._reported = (), {}  # as before the first refresh that finds a worker
        assert (await scale_of(stand))["workers_serving"] == 1


async def test_without_a_store_there_is_no_answer_and_the_metric_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_model: str) -> Any:
        raise ConnectionError("no store")

    clock = ShiftedClock()
    async with running_stand(clock=clock) as stand:
        before = wanted_in((await stand.http.get("/metrics")).text)
        monkeypatch.setattr(stand.gateway.batches.forecasts, "due_work", broken)
        answer = await stand.http.get("/admin/scale")
        clock.shift_s = 10  # beyond the time for which one rendering answers
        after = wanted_in((await stand.http.get("/metrics")).text)
    assert answer.status_code == 503
    assert before == after == [0.0]
