"""Owners take turns, and each has a share of what is under way and of the memory."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.fairness import FairLock, HeldBytes, UnderWay
from gateway.http.middleware import OneAtATime
from gateway.identity import ApiKey, Keyring


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
    turns = FairLock()
    for _ in range(3):
        before = iterations.num
        await turns.acquire("a")
        assert iterations.num == before
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_each_turn_is_in_an_iteration_of_its_own(iterations: Iterations) -> None:
    turns, taken = FairLock(), list[int]()

    async def take() -> None:
        await turns.acquire("a")
        taken.append(iterations.num)

    await asyncio.gather(*(take() for _ in range(5)))
    assert len(set(taken)) == 5 and taken == sorted(taken)


async def test_clients_take_turns() -> None:
    turns, order = FairLock(), list[str]()

    async def take(client: str) -> None:
        await turns.acquire(client)
        order.append(client)

    await asyncio.gather(*(take("greedy") for _ in range(6)), take("other"))
    assert order.index("other") <= 2


@pytest.mark.parametrize("client", ["a", "b"])
async def test_who_no_longer_wants_a_turn_keeps_nobody_waiting(client: str) -> None:
    turns = FairLock()
    await turns.acquire("a")
    gone, last = asyncio.create_task(turns.acquire(client)), asyncio.create_task(turns.acquire("a"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(last, 30)


async def nothing_comes() -> Message:
    return {"type": "http.disconnect"}


async def nothing_is_sent(message: Message) -> None:
    raise AssertionError("the app sends nothing")


def scope_of(secret: str = "") -> Scope:
    return {"type": "http", "client": ("127.0.0.1", 1), "headers": [(b"authorization", f"Bearer {secret}".encode())]}


async def test_requests_that_come_together_begin_one_after_the_other(iterations: Iterations) -> None:
    begun = list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(iterations.num)

    begin = OneAtATime(app, Keyring())
    await asyncio.gather(*(begin(scope_of(), nothing_comes, nothing_is_sent) for _ in range(5)))
    assert len(set(begun)) == 5


@pytest.mark.parametrize(("secret", "goes_first"), [("b", True), ("wrong", False)])
async def test_keys_that_share_an_address_take_turns(secret: str, goes_first: bool) -> None:
    """A secret that is no key's does not open a queue of its own: it would cost nothing to make up many."""
    keyring = Keyring([ApiKey(name, hashlib.sha256(name.encode()).digest()) for name in ("a", "b")])
    begun = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["headers"][0][1].decode().removeprefix("Bearer "))

    begin = OneAtATime(app, keyring)
    flood = "a" if secret == "b" else "made up"
    scopes = [*(scope_of(flood) for _ in range(20)), scope_of(secret)]
    await asyncio.gather(*(begin(scope, nothing_comes, nothing_is_sent) for scope in scopes))
    assert (begun.index(secret) <= 2) is goes_first


def test_what_is_under_way_is_limited_for_each_owner_and_in_all() -> None:
    under_way = UnderWay(most=5, of_owner=3)
    ends = [under_way.begin("one") for _ in range(3)]
    assert under_way.is_full("one") and not under_way.is_full("two")
    ends[0]()
    assert not under_way.is_full("one") and under_way.num_of("one") == 2
    for owner in ("one", "two", None):
        under_way.begin(owner)
    assert under_way.is_full("three")


def test_an_owner_may_hold_twice_the_free_bytes() -> None:
    held = HeldBytes(90)
    held.add("one", 60)
    assert not held.has_too_many("one") and held.is_crowded
    held.add("two", 20)
    assert held.has_too_many("one") and not held.has_too_many("two")
    held.add("one", -60)
    assert not held.is_crowded and not held.has_too_many("two")
