"""Responses of bulk that are not refused: where the queue is full, they wait in the background until they are taken."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tests.gateway.jobs.responses.test_background import ended
from tests.gateway.offline import ShiftedClock
from tests.gateway.protocol.test_errors import error_of
from tests.gateway.stand import Stand, make_tiers, running_stand
from tests.gateway.tiny_model import MODEL
from tests.waiting import until

FLEX = {"model": MODEL, "input": "hi", "service_tier": "flex"}
BACKGROUND = {**FLEX, "background": True}


class QuickClock(ShiftedClock):
    """Cuts every wait short, so that what is refused comes back at once."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.01))


@asynccontextmanager
async def full(redis: Redis | None) -> AsyncIterator[Stand]:
    """Run a gateway whose bulk queue holds one request, which no worker claims until `worker.claims` is set."""
    tiers = make_tiers(bulk={"queue_limit": 1})
    async with running_stand(redis=redis, clock=QuickClock(), drain_s=0.0, tiers=tiers) as stand:
        stand.worker.claims = False
        first = asyncio.create_task(stand.post("/v1/responses", {**FLEX, "store": False}))
        await until(lambda: stand.waiting == 1)
        yield stand
        stand.worker.claims = True
        assert (await first).status_code == 200


async def post(stand: Stand, body: dict[str, Any], **headers: str) -> httpx.Response:
    return await stand.http.post("/v1/responses", json=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "headers"), [(BACKGROUND, {}), (FLEX, {"x-tidegate-may-wait": "1"})], ids=["background", "header"]
)
async def test_it_is_queued_with_a_time_and_then_taken(
    redis_client: Redis, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async with full(redis_client) as stand:
        response = await post(stand, body, **headers)
        created = response.json()
        assert (response.status_code, created["status"], created["background"]) == (200, "queued", True)
        assert response.headers["x-tidegate-expected-s"] == "20", "one of the queue ends in so many seconds"
        assert (await stand.client.responses.retrieve(created["id"])).status == "queued"
        refused = stand.metric("tidegate_requests_rejected_total", tier="bulk", reason="queue_full")
        stand.worker.claims = True
        done = await ended(stand, created["id"])
        assert stand.metric("tidegate_requests_rejected_total", tier="bulk", reason="queue_full") == refused
    assert done.status == "completed" and done.output_text


@pytest.mark.parametrize(
    "body",
    [FLEX, {**BACKGROUND, "deadline_ms": 5000}, {**FLEX, "store": False}],
    ids=["cannot wait", "has a deadline of its own", "cannot be stored"],
)
async def test_others_are_refused_as_before(redis_client: Redis, body: dict[str, Any]) -> None:
    headers = {"x-tidegate-may-wait": "1"} if body.get("store") is False else {}
    async with full(redis_client) as stand:
        response = await post(stand, body, **headers)
        assert error_of(response, 429)["code"] == "resource_unavailable"
        assert not [key async for key in redis_client.scan_iter("*resp_*")]


async def test_one_that_waits_can_be_cancelled(redis_client: Redis) -> None:
    async with full(redis_client) as stand:
        created = (await post(stand, BACKGROUND)).json()
        assert (await stand.client.responses.cancel(created["id"])).status == "cancelled"
        assert (await stand.client.responses.retrieve(created["id"])).status == "cancelled"
