"""Webhooks of background responses: each end is told once, also the end of a response whose gateway has died."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from engine.interface import FinishReason
from gateway.identity import ApiKey, Keyring
from gateway.jobs.responses import background, response_ends
from gateway.jobs.responses.store import ResponseStore
from gateway.jobs.webhooks import service
from gateway.store_keys import GatewayKeys
from scheduler.request import EventKind, Request, TokenEvent
from tests.gateway.jobs.webhooks.receiver import Receiver
from tests.gateway.offline import ShiftedClock
from tests.gateway.scripted_worker import token_by_token
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL, text_of, token_ids
from tests.waiting import until

SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "POLL_S", 0.01)
    monkeypatch.setattr(response_ends, "SWEEP_S", 0.01)
    monkeypatch.setattr(background, "RENEW_S", 0.01)


def answer(request: Request) -> list[TokenEvent]:
    """Fail, cut off, or answer, as the prompt says. One that says `wait` never ends."""
    prompt = text_of(request.prompt_token_ids)
    if "fail" in prompt:
        return [TokenEvent(request.id, EventKind.FAILED, error="no")]
    if "wait" in prompt:
        return [TokenEvent(request.id, EventKind.TOKENS, 0, (70,))]
    reason = FinishReason.LENGTH if "cut" in prompt else FinishReason.STOP
    return list(token_by_token(request, token_ids("Hello"), reason))


@asynccontextmanager
async def telling(redis: Redis, clock: ShiftedClock | None = None, keys: Sequence[ApiKey] = ()) -> AsyncIterator[Stand]:
    """Run a gateway that stores responses and sends webhooks. Its clock is `clock`."""
    options: dict[str, Any] = {"webhook_secret": SecretStr(SECRET), "keyring": Keyring(keys) if keys else None}
    async with running_stand(answer, redis=redis, clock=clock or ShiftedClock(), **options) as stand:
        yield stand


async def create(stand: Stand, text: str, receiver: Receiver | None, **more: Any) -> str:
    """Create a response in the background. Return its id."""
    metadata = {} if receiver is None else {"metadata": {"webhook": receiver.url}}
    return (await stand.client.responses.create(model=MODEL, input=text, background=True, **metadata, **more)).id


def told(receiver: Receiver) -> list[tuple[str, str]]:
    """Return type and response of each event, as the official client reads them."""
    with openai.OpenAI(api_key="-", base_url="http://localhost/v1") as client:
        events = [client.webhooks.unwrap(body, headers, secret=SECRET) for headers, body in receiver.got]
    return sorted((event.type, event.data.id) for event in events)  # type: ignore[union-attr]


async def _nothing_is_left(redis: Redis) -> bool:
    return not await redis.exists(GatewayKeys.of(redis).responses_untold)


async def test_the_official_client_takes_the_event_of_each_end(redis_client: Redis, receiver: Receiver) -> None:
    async with telling(redis_client) as stand:
        names = {text: await create(stand, text, receiver) for text in ("hi", "fail", "cut", "wait")}
        await stand.client.responses.cancel(names["wait"])
        await stand.client.responses.cancel(names["wait"])
        await until(lambda: len(receiver.got) == 4)
        await until(lambda: _nothing_is_left(redis_client))
    assert told(receiver) == [
        ("response.cancelled", names["wait"]),
        ("response.completed", names["hi"]),
        ("response.failed", names["fail"]),
        ("response.incomplete", names["cut"]),
    ]


async def test_only_ends_of_background_responses_with_a_url_are_told(redis_client: Redis, receiver: Receiver) -> None:
    async with telling(redis_client) as stand:
        await stand.client.responses.create(model=MODEL, input="hi", metadata={"webhook": receiver.url})
        await create(stand, "hi", None)
        deleted = await create(stand, "wait", receiver)
        await stand.client.responses.delete(deleted)
        last = await create(stand, "hi", receiver)
        await until(lambda: bool(receiver.got))
        await until(lambda: _nothing_is_left(redis_client))
    assert told(receiver) == [("response.completed", last)]


async def test_a_url_that_may_not_be_called_is_refused(redis_client: Redis) -> None:
    async with telling(redis_client) as stand:
        body = {"model": MODEL, "input": "hi", "background": True, "metadata": {"webhook": "http://10.0.0.1/hook"}}
        refused = await stand.http.post("/v1/responses", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "metadata.webhook"


@pytest.mark.parametrize("has_ended", [True, False])
async def test_another_gateway_tells_of_the_end_if_the_first_one_died_before(
    redis_client: Redis, receiver: Receiver, has_ended: bool
) -> None:
    """It died before the end, or between the end and its report."""
    clock = ShiftedClock()
    store = ResponseStore(redis_client, clock, 3600.0, 2**20)
    status = "completed" if has_ended else "in_progress"
    left = {"id": f"resp_{1:032x}", "status": status, "output": [], "previous_response_id": None, "background": True}
    left["metadata"] = {"webhook": receiver.url}
    await store.create(left, [], None, lease_ms=clock.wall_ms() + 1000)
    await redis_client.hset(GatewayKeys.of(redis_client).responses_untold, left["id"], "")  # type: ignore[misc]
    async with telling(redis_client, clock) as stand:
        looked_after = await create(stand, "wait", receiver)
        clock.shift_s = 2
        await until(lambda: bool(receiver.got))
        assert (await stand.client.responses.retrieve(looked_after)).status == "in_progress"
        assert told(receiver) == [("response.completed" if has_ended else "response.failed", left["id"])]
        await stand.client.responses.cancel(looked_after)
        await until(lambda: len(receiver.got) == 2)
