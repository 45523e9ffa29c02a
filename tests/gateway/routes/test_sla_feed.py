"""GET /admin/sla/stream: its events, who may read it, and its end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sse_starlette import JSONServerSentEvent
from starlette.types import Message, Scope

from gateway.identity import Keyring
from gateway.routes.operators.sla_feed import PERIOD_S, SlaFeed, SlaStreamResponse
from scheduler.queue.base import Backlog
from tests.gateway.routes.test_admin import key
from tests.gateway.stand import Stand, running_stand
from tests.scheduler.queue.harness import START_MS, ManualClock
from tests.waiting import until

URL = "/admin/sla/stream"
Event = tuple[str, dict[str, Any]]


async def events_of(response: httpx.Response) -> AsyncIterator[Event]:
    assert response.headers["content-type"].startswith("text/event-stream")
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def announce(stand: Stand, at_ms: int, decisions: dict[str, float]) -> None:
    """The worker explains itself: `decisions` maps each one's knob to the seconds since it was made."""
    [status] = await stand.worker.registry.workers()
    explanation = {
        "at_ms": at_ms,
        "tiers": {"realtime": {"knobs": {"batch_size": 8}, "signals": {"ttft_p99_s": 0.2}}},
        "decisions": [{"knob": knob, "ago_s": ago_s} for knob, ago_s in decisions.items()],
    }
    await stand.worker.registry.announce(status, json.dumps(explanation))


def knobs_of(data: dict[str, Any]) -> list[str]:
    return [decision["knob"] for decision in data["workers"][0]["decisions"]]


async def test_events_over_a_real_server() -> None:
    async with running_stand() as stand:
        await announce(stand, 1_000, {"first": 0.5})
        async with stand.http.stream("GET", URL) as response:
            events = events_of(response)
            name, data = await anext(events)
            explained = (await stand.http.get("/admin/sla")).json()
            assert name == "sla"
            assert data["waiting"]["bulk"] == {"requests": 0, "prompt_tokens": 0, "output_tokens": 0}
            assert set(data["waiting"]) == set(stand.gateway.tiers.tiers)
            assert {k: v for k, v in data.items() if k not in ("at_ms", "waiting")} == explained
            await announce(stand, 2_000, {"first": 1.5, "second": 0.5})
            knobs, later = knobs_of(data), data
            while later["workers"][0]["at_ms"] < 2_000:  # events that were read before the announcement
                before_ms = later["at_ms"]
                _, later = await anext(events)
                assert later["at_ms"] > before_ms
                knobs += knobs_of(later)
            assert later["workers"][0]["tiers"] == data["workers"][0]["tiers"]
            assert knobs == ["first", "second"], "no decision comes twice"


async def test_a_drain_ends_the_stream() -> None:
    async with running_stand() as stand, stand.http.stream("GET", URL) as response:
        events = events_of(response)
        await anext(events)
        stand.gateway.client.drain()
        async with asyncio.timeout(30):
            assert {name async for name, _ in events} <= {"sla"}


async def test_a_key_that_is_revoked_or_loses_its_role_sees_no_more() -> None:
    root = key("root", role="read")
    for left in (key("other", role="read"), replace(root, role=None)):
        async with (
            running_stand(keyring=Keyring([root])) as stand,
            stand.http.stream("GET", URL, headers={"authorization": "Bearer sk-root"}) as response,
        ):
            events = events_of(response)
            await anext(events)
            stand.gateway.keyring.replace([left])
            async with asyncio.timeout(30):
                assert {name async for name, _ in events} <= {"sla"}


class SteppedClock(ManualClock):
    """A clock that stands still until it is advanced. Whoever sleeps waits for that."""

    async def sleep(self, seconds: float) -> None:
        due_ms = self.ms + int(1000 * seconds)
        while self.ms < due_ms:
            await asyncio.sleep(0)


class Client:
    """The parts of SchedulerClient that the feed uses."""

    def __init__(self) -> None:
        self.is_draining = False
        self.is_away = False
        self.num_reads = 0

    async def backlogs(self) -> dict[str, Backlog]:
        self.num_reads += 1
        if self.is_away:
            raise ConnectionError("no store")
        return {"realtime": Backlog(1, 2, 3)}

    @property
    def registry(self) -> "Client":
        return self

    async def sla(self) -> dict[str, str]:
        return {"w1": "{}"}

    def predicted_ttfts_s(self, backlogs: dict[str, Backlog]) -> dict[str, float]:
        return {"realtime": 0.1}


def make_feed() -> tuple[SlaFeed, Client, SteppedClock]:
    client: Any = Client()
    clock = SteppedClock()
    return SlaFeed(client, clock), client, clock


def decoded(event: JSONServerSentEvent) -> Event:
    assert event.event is not None and event.data is not None
    return event.event, json.loads(event.data)


async def test_watchers_share_the_reads_of_the_store() -> None:
    feed, client, clock = make_feed()
    watchers = [feed.events(lambda: True) for _ in range(20)]
    times_ms: list[int] = []
    for _ in range(5):
        waiting = asyncio.gather(*(anext(watcher) for watcher in watchers))
        await asyncio.sleep(0)
        if times_ms:  # the first reading comes at once
            clock.advance(PERIOD_S)
        [at_ms] = {decoded(event)[1]["at_ms"] for event in await waiting}
        times_ms.append(at_ms)
    assert times_ms == [START_MS + 500 * i for i in range(5)]
    assert client.num_reads == 5


async def test_an_outage_of_the_store_is_reported_once() -> None:
    feed, client, clock = make_feed()
    client.is_away = True
    events = feed.events(lambda: True)
    name, data = decoded(await anext(events))
    assert name == "error"
    assert "store is not reachable" in data["error"]["message"]
    following = asyncio.ensure_future(anext(events))

    def time_passes(is_enough: Callable[[], bool]) -> bool:
        clock.advance(PERIOD_S)
        return is_enough()

    await until(lambda: time_passes(lambda: client.num_reads == 4))
    assert not following.done()
    client.is_away = False
    await until(lambda: time_passes(following.done))
    assert decoded(await following)[0] == "sla"
    client.is_away = True
    following = asyncio.ensure_future(anext(events))
    await until(lambda: time_passes(following.done))
    assert decoded(await following)[0] == "error", "a new outage is told again"


@pytest.mark.parametrize("reads", [True, False])
async def test_the_response_ends_for_a_client_that_hangs_up_or_reads_nothing(reads: bool) -> None:
    feed, _, _ = make_feed()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and not reads:
            await asyncio.Event().wait()
        sent.append(message)

    async def receive() -> Message:
        await until(lambda: len(sent) >= 2)  # never for a client that takes nothing
        return {"type": "http.disconnect"}

    scope: Scope = {"type": "http", "method": "GET"}
    async with asyncio.timeout(30):
        await SlaStreamResponse(feed, lambda: True, send_timeout_s=0.02)(scope, receive, send)
