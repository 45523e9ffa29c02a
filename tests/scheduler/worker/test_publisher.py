"""The publisher sends events in order, merges them while the store is slow, and drops work of missing gateways."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from scheduler.events.memory import MemoryEventChannel
from scheduler.holdings.report import Report
from scheduler.queue.memory import MemoryQueue
from scheduler.request import EventKind, Lease, TokenEvent
from scheduler.request_state import RequestState
from scheduler.store.outage import StoreOutage
from scheduler.virtual_time import VirtualClock
from scheduler.worker.checkpoints import Checkpointer
from scheduler.worker.publisher import Publisher
from tests.scheduler.builders import make_request
from tests.scheduler.world import played_by, run_bounded


class SlowChannel(MemoryEventChannel):
    """Takes a second for each message, and keeps the messages."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.messages: list[list[TokenEvent]] = []

    async def publish(self, messages: Mapping[str, Sequence[TokenEvent]]) -> list[str]:
        await self._clock.sleep(1.0)
        self.messages += map(list, messages.values())
        return await super().publish(messages)


class Rig:
    """A running publisher with its collaborators; takes the place of `RequestIntake`."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.queue = MemoryQueue(self.clock)
        self.events = SlowChannel(self.clock)
        self.dropped: list[str] = []
        self.states: list[RequestState] = []
        rig: Any = self  # for `drop` and `states` alone
        checkpointer = Checkpointer(rig, self.queue, StoreOutage(), self.clock)
        self.publisher = Publisher(self.queue, self.events, rig, checkpointer, StoreOutage(), self.clock)

    def drop(self, request_ids: Iterable[str]) -> list[RequestState]:
        self.dropped += request_ids
        return []

    async def put(self, *names: str) -> list[Lease]:
        await self.queue.put([make_request(name) for name in names])
        return [Lease(c.request.id, c.fence) for c in await self.queue.claim({"realtime": 99}, 60.0)]


def play(story: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        rig = Rig()
        await rig.events.open("gateway")
        running = asyncio.create_task(rig.publisher.run())
        await story(rig)
        rig.publisher.close()
        await running

    run_bounded(main())


def report(*events: TokenEvent, leases: Sequence[Lease] = (), reply_to: str = "gateway") -> Report:
    made = Report(leases=list(leases))
    made.events[reply_to] += events
    return made


def token(index: int, of: str = "r") -> TokenEvent:
    return TokenEvent(of, EventKind.TOKENS, index, (index,))


def finished(index: int, of: str = "r") -> TokenEvent:
    return TokenEvent(of, EventKind.FINISHED, index)


@played_by(play)
async def test_reports_made_while_a_message_is_on_its_way_are_merged_in_order(rig: Rig) -> None:
    for index in range(100):
        rig.publisher.send(report(token(index)))
        await rig.clock.sleep(0.01)
    rig.publisher.close()
    await rig.clock.sleep(2.0)
    assert len(rig.events.messages) <= 7, "one a second, not one a step"
    assert [e.index for message in rig.events.messages for e in message] == list(range(100))


@played_by(play)
async def test_closing_sends_everything_first(rig: Rig) -> None:
    leases = await rig.put("r")
    rig.publisher.send(report(token(0)))
    await rig.clock.sleep(0.5)
    rig.publisher.send(report(finished(1), leases=leases))
    rig.publisher.close()
    await rig.clock.sleep(5.0)
    assert [[e.index for e in m] for m in rig.events.messages] == [[0], [1]]
    assert await rig.queue.known(["r"]) == [False], "acknowledged"


@played_by(play)
async def test_a_failure_is_not_told_if_another_worker_has_the_request(rig: Rig) -> None:
    [lost, held] = await rig.put("lost", "held")
    await rig.queue.release([lost])
    await rig.queue.claim({"realtime": 1}, 60.0)
    failures = [TokenEvent(x.request_id, EventKind.FAILED, error="…", fence=x.fence) for x in (lost, held)]
    rig.publisher.send(report(*failures, token(0), leases=[lost, held]))
    await rig.clock.sleep(3.0)
    assert [e.request_id for e in rig.events.messages[0]] == ["held", "r"]
    assert await rig.queue.known(["lost", "held"]) == [True, False]


@played_by(play)
async def test_only_unfinished_requests_of_a_missing_gateway_are_dropped(rig: Rig) -> None:
    leases = await rig.put("ended", "open")
    rig.publisher.send(report(token(0, "ended"), token(0, "open"), reply_to="gone"))
    rig.publisher.send(report(finished(1, "ended"), token(1, "open"), leases=leases[:1], reply_to="gone"))
    await rig.clock.sleep(3.0)
    assert len(rig.events.messages) == 1
    assert rig.dropped == ["open"]
    assert await rig.queue.known(["ended", "open"]) == [False, False]
