"""Requests on their way through a store: modeled gateways put them and read events, modeled workers claim and end them.

The commands are those of the product's queue and events. Loads differ in time only: each worker holds the same number
of requests, so claims, events and acknowledgements have the same sizes at each rate.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from bench.store.wire import Pause, Wire, WireClient, Wires, packed
from engine.interface import FinishReason, SamplingParams
from scheduler.clock import SystemClock
from scheduler.events.redis import RedisEventChannel
from scheduler.queue.base import AheadLimit, Preference
from scheduler.queue.redis import RedisQueue
from scheduler.request import EventKind, Lease, Request, TokenEvent
from scheduler.store import connection
from scheduler.store.keys import EVENTS_HEARTBEAT_S, Keys

CLOCK, GATEWAYS = SystemClock(), ("gateway-0", "gateway-1", "gateway-2", "gateway-3")
AHEAD = AheadLimit(1e6, 1e6, 1e-6, 1e-6, ("realtime",))
GOAL_PER_S = 10_000.0
PUTTERS = 4  # connections of a gateway on which it puts
WORKERS, BATCH = 40, 20  # workers that serve requests, and how many each of them holds
STEP_S = 0.02  # between two steps of a worker at `GOAL_PER_S`; with fewer requests a second, steps are as much longer
NUM_TOKENS = 3  # of a request: one in each step of its worker


@dataclass
class Load:
    """`rate` requests a second for `seconds`, or fewer if the store or this process cannot do more.

    With `prefers`, each put prefers one of the workers, as the next turn of a chat does.
    """

    url: str
    rate: float
    seconds: float
    prefers: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        pool = connection.connect(self.url).connection_pool
        self.client = WireClient(connection_pool=pool)
        self.keys = Keys.of(self.client)
        self.wires = Wires(self.url.removeprefix("unix://"))
        self.cpu_s = self.took_s = 0.0  # of the store; and by the clock
        self._gap_s = len(GATEWAYS) * PUTTERS / self.rate  # between two puts of one connection

    def run(self) -> None:
        for gateway in GATEWAYS:
            self.wires.add(self._listen(gateway))
        for number in range(WORKERS):
            wire = self.wires.add((worker := Worker(self, f"w{number}")).work())
            self.wires.add(worker.listen(wire))
        self.wires.run(self._measure())

    async def _measure(self) -> None:
        await Pause(until_s=time.monotonic() + 0.5)  # all listen
        before_s, begun_s = await self._cpu_s(), time.monotonic()
        for gateway in GATEWAYS:
            for number in range(PUTTERS):
                self.wires.add(self._put(gateway, number, begun_s))
        while self.counts["ends"] < len(GATEWAYS) * PUTTERS * int(self.seconds / self._gap_s):
            await Pause(until_s=time.monotonic() + 0.05)
        self.cpu_s, self.took_s = await self._cpu_s() - before_s, time.monotonic() - begun_s

    async def _cpu_s(self) -> float:
        info = await self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    async def _put(self, gateway: str, putter: int, begun_s: float) -> None:
        """Put requests one by one, as chats come."""
        queue, sampling = RedisQueue(self.client, CLOCK), SamplingParams(max_tokens=NUM_TOKENS)
        for number in range(int(self.seconds / self._gap_s)):
            if (due_s := begun_s + (number + putter / PUTTERS) * self._gap_s) > time.monotonic():
                await Pause(until_s=due_s)
            now_ms = CLOCK.wall_ms()
            name = f"{gateway}-{putter}-{number}"
            request = Request(name, "bulk", (7,) * 128, sampling, now_ms, now_ms + 1000, gateway)
            prefer = Preference((f"w{self.counts['puts'] % WORKERS}",), BATCH, now_ms + 1000) if self.prefers else None
            await queue.put([request], 20_000, AHEAD, 2**30, prefer)
            self.counts["puts"] += 1

    async def _listen(self, gateway: str) -> None:
        """Read events as the product's listener does, with a heartbeat each second."""
        channel = RedisEventChannel(self.client)
        await channel.open(gateway)
        beat_s = time.monotonic()
        while True:
            if time.monotonic() >= beat_s:
                await channel._heartbeat(self.client, gateway)
                beat_s = time.monotonic() + EVENTS_HEARTBEAT_S
            for entry_id, _ in await channel._read(self.client, gateway, EVENTS_HEARTBEAT_S):
                channel._last_ids[gateway] = entry_id
            self.counts["reads"] += 1


class Worker:
    """Claims when woken and where there is room; in each step, publishes a token of each request, and ends some."""

    def __init__(self, load: Load, name: str) -> None:
        self._load = load
        self._name = name
        self._queue = RedisQueue(load.client, CLOCK, name)
        self._queue._start_listening = lambda: None  # type: ignore[method-assign]  # `listen` does it
        self._channel = RedisEventChannel(load.client)
        self._held: dict[Lease, tuple[str, int]] = {}  # the gateway and the tokens of each request
        self._is_woken = False

    async def listen(self, worker: Wire) -> None:
        await Pause(packed(("SUBSCRIBE", self._load.keys.wake + self._name)))
        while True:
            await Pause(b"")
            self._is_woken = True
            self._load.wires.wake(worker)

    async def work(self) -> None:
        step_s = STEP_S * GOAL_PER_S / self._load.rate
        due_s, waits = time.monotonic() + step_s, False
        while True:
            if not waits and (room := BATCH - len(self._held)):
                waits = await self._claim(room) < room
            if not self._is_woken and time.monotonic() < due_s:
                await Pause(until_s=due_s)
            if self._is_woken:
                self._is_woken = waits = False
                continue
            waits = waits and len(self._held) < BATCH
            await self._step()
            due_s = time.monotonic() + step_s

    async def _claim(self, room: int) -> int:
        claimed = await self._queue.claim({"bulk": room}, 60.0, len(self._held))
        self._held |= {Lease(c.request.id, c.fence): (c.request.reply_to, 0) for c in claimed}
        self._load.counts["claims"] += 1
        return len(claimed)

    async def _step(self) -> None:
        events: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        ended = [lease for lease, (_, index) in self._held.items() if index == NUM_TOKENS - 1]
        for lease, (gateway, index) in self._held.items():
            kind, reason = (EventKind.FINISHED, FinishReason.LENGTH) if lease in ended else (EventKind.TOKENS, None)
            events[gateway].append(TokenEvent(lease.request_id, kind, index, (7,), reason, fence=lease.fence))
            self._held[lease] = (gateway, index + 1)
        if events:
            await self._channel.publish(events)
        self._load.counts.update(messages=len(events), ends=sum(await self._queue.ack(ended)))
        for lease in ended:
            del self._held[lease]
