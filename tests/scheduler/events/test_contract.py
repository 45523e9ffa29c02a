"""The contract of event channels: one suite, run in memory and on a real server."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.interface import FinishReason, TokenLogprobs
from scheduler.events.base import EventChannel
from scheduler.events.memory import MemoryEventChannel
from scheduler.events.redis import RedisEventChannel
from scheduler.request import EventKind, TokenEvent
from scheduler.store import connection
from tests.waiting import until


@pytest.fixture(params=["memory", "redis"])
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[EventChannel]:
    if request.param == "memory":
        yield MemoryEventChannel()
        return
    request.getfixturevalue("no_leaked_keys")
    client = connection.connect(request.getfixturevalue("valkey_url"))
    channel = RedisEventChannel(client)
    yield channel
    await channel.close()
    await client.aclose()


def tokens(*token_ids: int, request_id: str = "r", index: int = 0) -> TokenEvent:
    return TokenEvent(request_id, EventKind.TOKENS, index=index, token_ids=token_ids)


async def take(channel: EventChannel, gateway_id: str, count: int) -> list[list[TokenEvent]]:
    messages: list[list[TokenEvent]] = []
    async with asyncio.timeout(30):
        async for message in channel.listen(gateway_id):
            messages.append(message)
            if len(messages) == count:
                break
    return messages


async def test_messages_arrive_in_order_as_they_were_sent(channel: EventChannel) -> None:
    await channel.open("g")
    sent = [[tokens(n, index=n), tokens(n, n + 1, request_id="s")] for n in range(600)]
    listening = asyncio.create_task(take(channel, "g", len(sent)))
    for message in sent:
        assert await channel.publish({"g": message}) == []
    assert await listening == sent


async def test_a_gateway_beats_while_it_listens_and_not_after_its_end(channel: EventChannel) -> None:
    assert await channel.beats(["g"]) == [None]
    assert await channel.beats([]) == []
    await channel.open("g")
    first, unknown = await channel.beats(["g", "unknown"])
    assert first is not None and unknown is None
    listening = asyncio.create_task(take(channel, "g", 1))

    async def beats_again() -> bool:
        return (await channel.beats(["g"]))[0] not in (None, first)

    await until(beats_again)
    await channel.publish({"g": [tokens(1)]})
    await listening
    await channel.close()
    assert await channel.beats(["g"]) == [None]


async def test_every_field_of_an_event_arrives(channel: EventChannel) -> None:
    await channel.open("g")
    events = [
        TokenEvent("a", EventKind.FINISHED, 4, (1, 2, 3), FinishReason.LENGTH, cached_tokens=16),
        TokenEvent("b", EventKind.FAILED, error="NaN logits"),
        TokenEvent("c", EventKind.CANCELLED),
        TokenEvent(
            "d",
            EventKind.TOKENS,
            token_ids=(7,),
            logprobs=(TokenLogprobs(7, -0.5, ((7, -0.5), (8, -1.25))),),
            prompt_logprobs=(TokenLogprobs(3, -9999.0),),
        ),
    ]
    await channel.publish({"g": events})
    assert await take(channel, "g", 1) == [events]


async def test_a_gateway_gets_only_its_own_messages(channel: EventChannel) -> None:
    await channel.open("g")
    await channel.open("h")
    await channel.publish({"h": [tokens(2)]})
    await channel.publish({"g": [tokens(1)]})
    assert await take(channel, "g", 1) == [[tokens(1)]]
    assert await take(channel, "h", 1) == [[tokens(2)]]


async def test_close_ends_the_listener_and_makes_publishing_fail(channel: EventChannel) -> None:
    await channel.open("g")
    await channel.publish({"g": [tokens(1)]})
    heard = asyncio.Event()

    async def listen() -> None:
        async for _ in channel.listen("g"):
            heard.set()

    listening = asyncio.create_task(listen())
    async with asyncio.timeout(30):
        await heard.wait()
        await channel.close()
        await listening
    assert await channel.publish({"g": [tokens(2)]}) == ["g"]


async def test_a_cancelled_listener_ends_as_cancelled(channel: EventChannel) -> None:
    await channel.open("g")
    listening = asyncio.create_task(take(channel, "g", 1))
    await asyncio.sleep(0)
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
