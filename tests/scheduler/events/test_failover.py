"""Failovers that lose messages: a gateway sees all that is published after them."""

import asyncio
import time

import pytest

from scheduler.events.redis import RedisEventChannel
from scheduler.request import EventKind, TokenEvent
from scheduler.store import connection
from scheduler.store.keys import Keys
from tests.scheduler.store.nodes import Pair
from tests.waiting import until

AHEAD_S = 3  # by which the clock of the first primary is ahead


def message(number: int) -> list[TokenEvent]:
    return [TokenEvent("r", EventKind.TOKENS, index=number, token_ids=(number,))]


@pytest.mark.timeout(60)
async def test_messages_after_a_failover_to_a_slower_clock_are_all_received(pair: Pair) -> None:
    """The first primary publishes a message that the second one never has, by a clock that is ahead."""
    gateway, worker = connection.connect(pair.url), connection.connect(pair.url)
    reading, writing = RedisEventChannel(gateway, heartbeat_s=0.02), RedisEventChannel(worker)
    received: list[int] = []

    async def listen() -> None:
        async for events in reading.listen("g"):
            received.extend(event.index for event in events)

    await reading.open("g")
    await writing.publish({"g": message(0)})
    await pair.replica.has_all_of(pair.primary)
    pair.part()
    listening = asyncio.create_task(listen())
    pair.primary.ask("XADD", Keys().events + "g", f"{int((time.time() + AHEAD_S) * 1000)}-0", "", "")
    assert not await writing.publish({"g": message(1)})
    await until(lambda: received == [0, 1])
    await pair.demote()
    for number in range(2, 42):
        assert not await writing.publish({"g": message(number)})
    await until(lambda: len(set(received)) == 42)
    assert list(dict.fromkeys(received)) == list(range(42)), "in order, some twice"
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await reading.close()
    await gateway.aclose()
    await worker.aclose()
