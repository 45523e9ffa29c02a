"""Responses in the background: polling, following, cancelling, and a gateway that dies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from redis.asyncio import Redis
from redis.exceptions import TimeoutError as StoreSilent

from gateway.jobs.responses import background
from gateway.jobs.responses.event_log import EventWriter, follow
from gateway.jobs.responses.store import ResponseStore
from gateway.store_keys import GatewayKeys
from tests.gateway.offline import ShiftedClock
from tests.gateway.scripted_worker import Scripting
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL
from tests.waiting import until


@asynccontextmanager
async def storing(redis: Redis, script: Scripting | str = "Hello there!", **options: Any) -> AsyncIterator[Stand]:
    settings = {"clock": ShiftedClock(), "drain_s": 0.0, **options}
    async with running_stand(script, redis=redis, **settings) as stand:
        yield stand


async def ended(stand: Stand, response_id: str) -> Response:
    async with asyncio.timeout(30):
        while (found := await stand.client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.005)
    return found


async def test_a_background_response_is_queued_then_completed(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        stand.worker.gate.clear()
        created = await stand.client.responses.create(model=MODEL, input="hi", background=True)
        waiting = await stand.client.responses.retrieve(created.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await stand.client.responses.create(model=MODEL, input="x", previous_response_id=created.id)
        stand.worker.gate.set()
        done = await ended(stand, created.id)
        second = await stand.client.responses.create(model=MODEL, input="more", previous_response_id=created.id)
    assert created.status == waiting.status == "queued"
    assert created.background and created.output == []
    assert caught.value.param == "previous_response_id"
    assert done.status == "completed"
    assert done.output_text == "Hello there!"
    assert done.usage is not None and done.usage.output_tokens > 0
    assert second.status == "completed"


async def test_only_background_responses_are_cancelled(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        plain = await stand.client.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.BadRequestError):
            await stand.client.responses.cancel(plain.id)
        with pytest.raises(openai.BadRequestError):
            await stand.client.responses.retrieve(plain.id, stream=True)
        done = await ended(stand, (await stand.client.responses.create(model=MODEL, input="hi", background=True)).id)
        assert (await stand.client.responses.cancel(done.id)).status == "completed"


async def test_a_background_stream_goes_on_without_its_client(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        stand.worker.gate.clear()
        stream = await stand.client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        begun = [await anext(aiter(stream)), await anext(aiter(stream))]
        await stream.close()
        stand.worker.gate.set()
        response_id = begun[0].response.id  # type: ignore[union-attr]
        done = await ended(stand, response_id)
        whole = [e async for e in await stand.client.responses.retrieve(response_id, stream=True)]
        rest = [e async for e in await stand.client.responses.retrieve(response_id, stream=True, starting_after=4)]
    assert [event.type for event in begun] == ["response.created", "response.queued"]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert [event.type for event in whole[:4]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert whole[-1].type == "response.completed" and whole[-1].response == done
    assert [event.sequence_number for event in rest] == list(range(5, len(whole)))


async def test_a_key_has_a_limit_of_followers(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.responses.service.MAX_FOLLOWERS_OF_KEY", 1)
    async with storing(redis_client) as stand:
        stand.worker.gate.clear()
        stream = await stand.client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        events = aiter(stream)
        created: Any = await anext(events)
        with pytest.raises(openai.RateLimitError, match="poll the response"):
            await stand.client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        refused = await stand.http.get(f"/v1/responses/{created.response.id}?stream=true")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        stand.worker.gate.set()
        assert [event.type async for event in events][-1] == "response.completed"
        again = await stand.client.responses.retrieve(created.response.id, stream=True)
        assert [event.type async for event in again][-1] == "response.completed"


async def test_a_follower_does_not_wait_for_ever_for_the_store(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.jobs.responses.event_log.WAIT_S", 0.1)
    monkeypatch.setattr("gateway.jobs.responses.event_log.AWAY_S", 0.1)
    await redis_client.execute_command("CLIENT", "PAUSE", "1000", "ALL")  # an answer comes after the test's wait
    with pytest.raises(StoreSilent):
        async for _ in follow(redis_client, "resp_1", -1, waits=True):
            raise AssertionError("there are no events")


async def test_events_have_ids_that_no_clock_makes_and_are_there_once(redis_client: Redis) -> None:
    """Else a follower would never see what comes after a failover to a server whose clock is behind."""
    frames = (b"event: a\n\n", b"event: b\n\nevent: c\n\n")
    for _ in range(2):  # as if the writer had got no reply to the first
        writer = EventWriter(redis_client, "resp_1", 60.0)
        for part in frames:
            await writer.write(part, is_last=part is frames[-1])
    entries = await redis_client.xrange(GatewayKeys.of(redis_client).response_events + "resp_1")
    assert [entry_id for entry_id, _ in entries] == [b"1-0", b"2-0"]
    assert [new async for _, new in follow(redis_client, "resp_1", 1, waits=False)] == [b"event: c\n\n"]


async def test_the_stream_of_a_cancelled_response_ends(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        stand.worker.gate.clear()
        stream = await stand.client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        events = aiter(stream)
        created = await anext(events)
        await stand.client.responses.cancel(created.response.id)  # type: ignore[union-attr]
        kinds = [event.type async for event in events]
    assert kinds == ["response.queued"]


async def test_a_response_whose_gateway_died_has_failed(redis_client: Redis) -> None:
    clock = ShiftedClock()
    store = ResponseStore(redis_client, clock, 3600.0, 2**20)
    lost = {"id": f"resp_{1:032x}", "status": "queued", "output": [], "previous_response_id": None, "background": True}
    await store.create(lost, [], None, lease_ms=clock.wall_ms() - 1)
    async with storing(redis_client) as stand:
        found = await stand.http.get(f"/v1/responses/{lost['id']}")
        events = await stand.http.get(f"/v1/responses/{lost['id']}?stream=true")
    assert found.json()["status"] == "failed"
    assert found.json()["error"]["code"] == "server_error"
    assert events.text.startswith("event: response.failed\n")


@pytest.mark.parametrize("jump_s", [600, -600])
async def test_a_clock_that_jumps_makes_no_response_lost_and_none_immortal(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    monkeypatch.setattr(background, "RENEW_S", 0.02)
    clock = ShiftedClock()
    store = ResponseStore(redis_client, clock, 3600.0, 2**20)
    dead = {"id": f"resp_{2:032x}", "status": "queued", "output": [], "previous_response_id": None, "background": True}
    await store.create(dead, [], None, lease_ms=clock.wall_ms() + 1000)
    async with storing(redis_client, clock=clock) as stand:
        stand.worker.gate.clear()
        created = await stand.client.responses.create(model=MODEL, input="hi", background=True)
        clock.shift_s = jump_s
        assert (await stand.client.responses.retrieve(created.id)).status == "queued"
        assert (await stand.http.get(f"/v1/responses/{dead['id']}")).json()["status"] == "failed"
        stand.worker.gate.set()
        assert (await ended(stand, created.id)).status == "completed"


async def test_a_cancel_through_another_gateway_stops_the_generation(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RENEW_S", 0.01)
    async with storing(redis_client) as one, storing(redis_client) as other:
        one.worker.gate.clear()
        created = await one.client.responses.create(model=MODEL, input="hi", background=True)
        await other.client.responses.cancel(created.id)
        await until(lambda: one.waiting == 0)
        assert (await one.client.responses.retrieve(created.id)).status == "cancelled"


async def test_a_gateway_that_shuts_down_says_so(redis_client: Redis) -> None:
    async with storing(redis_client) as stand:
        stand.worker.gate.clear()
        created = await stand.client.responses.create(model=MODEL, input="hi", background=True)
    async with storing(redis_client) as stand:
        found = await stand.client.responses.retrieve(created.id)
    assert found.status == "failed"
    assert found.error is not None and "shut down" in found.error.message
