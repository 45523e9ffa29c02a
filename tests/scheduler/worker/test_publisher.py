"""What leaves a worker: in order, merged while the store is slow, and to gateways that are there."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from scheduler.events.memory import MemoryEventChannel
from scheduler.planning.step_report import StepReport
from scheduler.queue.memory import MemoryQueue
from scheduler.request import EventKind, Lease, TokenEvent
from scheduler.virtual_time import VirtualClock
from scheduler.worker.publisher import Publisher
from tests.scheduler.builders import make_request
from tests.scheduler.world import run_bounded


class SlowChannel(MemoryEventChannel):
    """Takes a second for each message, and notes them."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.messages: list[list[TokenEvent]] = []

    async def publish(self, reply_to: str, events: Sequence[TokenEvent]) -> bool:
        await self._clock.sleep(1.0)
        self.messages.append(list(events))
        return await super().publish(reply_to, events)


class Office:
    """An outbox with its collaborators, running."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.queue = MemoryQueue(self.clock)
        self.events = SlowChannel(self.clock)
        self.dropped: list[str] = []
        self.publisher = Publisher(self.queue, self.events, self)  # type: ignore[arg-type]  # for `drop` alone

    def drop(self, request_ids: Iterable[str]) -> None:
        self.dropped += request_ids

    async def put(self, *names: str) -> list[Lease]:
        await self.queue.put([make_request(name) for name in names])
        return [Lease(c.request.id, c.fence) for c in await self.queue.claim({"realtime": 99}, 60.0)]


def play(story: Callable[[Office], Awaitable[None]]) -> None:
    async def main() -> None:
        office = Office()
        await office.events.open("gateway")
        running = asyncio.create_task(office.publisher.run())
        await story(office)
        office.publisher.close()
        await running

    run_bounded(main())


def report(*events: TokenEvent, leases: Sequence[Lease] = (), reply_to: str = "gateway") -> StepReport:
    made = StepReport(leases=list(leases))
    made.events[reply_to] += events
    return made


def token(index: int, of: str = "r") -> TokenEvent:
    return TokenEvent(of, EventKind.TOKENS, index, (index,))


def finished(index: int, of: str = "r") -> TokenEvent:
    return TokenEvent(of, EventKind.FINISHED, index)


def test_what_comes_while_a_message_is_on_its_way_is_one_message_in_order() -> None:
    async def story(office: Office) -> None:
        for index in range(500):
            office.publisher.send(report(token(index)))
            await office.clock.sleep(0.01)
        office.publisher.close()
        await office.clock.sleep(2.0)
        assert len(office.events.messages) <= 7, "one a second, not one a step"
        assert [e.index for message in office.events.messages for e in message] == list(range(500))

    play(story)


def test_nothing_is_lost_when_it_is_closed() -> None:
    async def story(office: Office) -> None:
        leases = await office.put("r")
        office.publisher.send(report(token(0)))
        await office.clock.sleep(0.5)
        office.publisher.send(report(finished(1), leases=leases))
        office.publisher.close()
        await office.clock.sleep(5.0)
        assert [[e.index for e in m] for m in office.events.messages] == [[0], [1]]
        assert await office.queue.known(["r"]) == [False], "acknowledged"

    play(story)


def test_closing_an_idle_one_ends_it() -> None:
    async def story(office: Office) -> None:
        await office.clock.sleep(1.0)

    play(story)


def test_for_a_gateway_that_is_gone_only_what_is_unfinished_is_dropped() -> None:
    async def story(office: Office) -> None:
        leases = await office.put("ended", "open")
        office.publisher.send(report(token(0, "ended"), token(0, "open"), reply_to="gone"))
        office.publisher.send(report(finished(1, "ended"), token(1, "open"), leases=leases[:1], reply_to="gone"))
        await office.clock.sleep(3.0)
        assert len(office.events.messages) == 1
        assert office.dropped == ["open"]
        assert await office.queue.known(["ended", "open"]) == [False, False]

    play(story)
