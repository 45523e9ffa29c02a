"""Turns on the event loop keep pieces of work apart, and clients share them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.http.middleware import OneAtATime
from gateway.loop_turns import LoopTurns


class Iterations:
    """Counts the iterations of the event loop."""

    def __init__(self) -> None:
        self.num = 0

    async def run(self) -> None:
        while True:
            self.num += 1
            await asyncio.sleep(0)


@pytest.fixture
async def iterations() -> AsyncIterator[Iterations]:
    iterations = Iterations()
    task = asyncio.create_task(iterations.run())
    yield iterations
    task.cancel()


async def test_a_turn_comes_at_once_if_nobody_has_one(iterations: Iterations) -> None:
    turns = LoopTurns()
    for _ in range(3):
        before = iterations.num
        await turns.take("a")
        assert iterations.num == before
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_each_turn_is_in_an_iteration_of_its_own(iterations: Iterations) -> None:
    turns, taken = LoopTurns(), list[int]()

    async def take() -> None:
        await turns.take("a")
        taken.append(iterations.num)

    await asyncio.gather(*(take() for _ in range(5)))
    assert len(set(taken)) == 5 and taken == sorted(taken)


async def test_clients_take_turns() -> None:
    turns, order = LoopTurns(), list[str]()

    async def take(client: str) -> None:
        await turns.take(client)
        order.append(client)

    await asyncio.gather(*(take("greedy") for _ in range(6)), take("other"))
    assert order.index("other") <= 2


@pytest.mark.parametrize("client", ["a", "b"])
async def test_who_no_longer_wants_a_turn_keeps_nobody_waiting(client: str) -> None:
    turns = LoopTurns()
    await turns.take("a")
    gone, last = asyncio.create_task(turns.take(client)), asyncio.create_task(turns.take("a"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(last, 30)


async def test_requests_that_come_together_begin_one_after_the_other(iterations: Iterations) -> None:
    begun = list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(iterations.num)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("the app sends nothing")

    one_at_a_time = OneAtATime(app)
    scope = {"type": "http", "client": ("127.0.0.1", 1)}
    await asyncio.gather(*(one_at_a_time(dict(scope), receive, send) for _ in range(5)))
    assert len(set(begun)) == 5
