"""`python -m bench store`: the store's CPU time for idle workers, for requests on their way, and for a dead worker.

Workers and gateways are modeled, with the product's own loops, queue and events. All figures are of the store's
process. At fewer requests a second than the goal's, its caches are colder and fewer requests share a claim.
"""

import asyncio
import tempfile
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry
from pydantic import BaseModel, Field
from redis.asyncio import Redis

from engine.interface import FinishReason, SamplingParams
from engine.modeled.engine import ModeledEngine
from loadtest.reporting.record import Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import one_sentence
from loadtest.simulation.cost_card import load_cost_card
from loadtest.simulation.deployment import build_core
from scheduler.client.client import SchedulerClient
from scheduler.clock import SystemClock
from scheduler.config import load_tiers, shipped_tiers_path
from scheduler.drivers.steps.driver import StepDriver
from scheduler.events.redis import RedisEventChannel
from scheduler.queue.base import AheadLimit
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.request import EventKind, Lease, Request, TokenEvent
from scheduler.store import connection
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import build_loop
from scheduler.worker.metrics import SchedulerMetrics
from tidegate.valkey import ValkeyError, running_valkey

CLOCK, GATEWAYS = SystemClock(), ("gateway-0", "gateway-1", "gateway-2", "gateway-3")
AHEAD = AheadLimit(1e6, 1e6, 1e-6, 1e-6, ("realtime",))
GOAL_PER_S = 10_000.0
WORKERS, BATCH = 40, 16  # workers that serve requests, and how many each of them holds
STEP_S = 0.02  # between two steps of a worker at `GOAL_PER_S`; with fewer requests a second, steps are as much longer
NUM_TOKENS = 3  # of a request: one in each step of its worker
LEASES, LEASES_EACH = 25_600, 256


class Store(BaseModel):
    """The CPU time of a real store: for idle workers, for each request, and when a worker dies beside many leases."""

    workers: int = Field(100, ge=1, le=1000, description="Idle workers.")
    seconds: float = Field(10.0, gt=0, description="Seconds of each measurement.")
    rate: float = Field(1000.0, gt=0, description="Requests put in a second: at most what the clients here can do.")

    def cli_cmd(self) -> None:
        with (
            one_sentence(ValkeyError, OSError, said_by="store"),
            tempfile.TemporaryDirectory() as folder,
            running_valkey(Path(folder)) as url,
        ):
            publish(asyncio.run(self._measure(url)))

    async def _measure(self, url: str) -> Record:
        counts: Counter[str] = Counter()
        idle, request_s = await idle_share(url, self.workers, self.seconds), await self._request_s(url, counts)
        rows = [
            (f"{self.workers} idle workers, {len(GATEWAYS)} gateways", f"{100 * idle:.1f} % of a core", "2 %"),
            ("a request: put, claim, events, ack", f"{1e6 * request_s:.0f} us", f"{0.7e6 / GOAL_PER_S:.0f} us"),
            ("claims a put", f"{counts['claims'] / counts['puts']:.2f}", "2"),
            (f"a dead worker without leases, of {LEASES}", f"{await death_ms(url, 'none'):.2f} ms", "1 ms"),
            (f"a dead worker with {LEASES_EACH} of them", f"{await death_ms(url, 'w0'):.2f} ms", ""),
        ]
        note = f"{self.rate:.0f} puts a second, {counts['messages'] / counts['puts']:.2f} messages of events a put"
        return Record(sections=[Section(table=Table.of(("what", "the store's time", "goal"), rows), notes=(note,))])

    async def _request_s(self, url: str, counts: Counter[str]) -> float:
        """Put requests one by one, as chats come, and return the store's CPU seconds for each."""
        step_s, gap_s = STEP_S * GOAL_PER_S / self.rate, len(GATEWAYS) / self.rate
        async with connection.connect(url) as client, asyncio.TaskGroup() as tasks:
            channel = RedisEventChannel(client)
            for gateway in GATEWAYS:
                await channel.open(gateway)
            others = [tasks.create_task(listen(channel, gateway, counts)) for gateway in GATEWAYS]
            queues = [RedisQueue(client, CLOCK, f"w{number}") for number in range(WORKERS)]
            others += [tasks.create_task(work(queue, channel, step_s, counts)) for queue in queues]
            before_s = await cpu_s(client)
            await asyncio.gather(*(put(queues[0], name, gap_s, self.seconds, counts) for name in GATEWAYS))
            while counts["ends"] < counts["puts"]:
                await asyncio.sleep(0.1)
            used_s = await cpu_s(client) - before_s
            for task in others:
                task.cancel()
        return used_s / counts["puts"]


async def cpu_s(client: Redis) -> float:
    info = await client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def idle_share(url: str, workers: int, seconds: float) -> float:
    """Return the share of a core that idle workers and gateways cost; each has connections of its own."""
    tiers, info, loops = load_tiers(shipped_tiers_path()), load_cost_card("135m-cpu").engine_info(), []
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as running:
        for name in (*GATEWAYS, *(f"w{number}" for number in range(workers))):
            client = await stack.enter_async_context(connection.connect(url))
            identity = WorkerIdentity(name, ("model",), CLOCK.wall_ms(), "1")
            parts = RedisQueue(client, CLOCK, identity.holder), RedisEventChannel(client), RedisWorkerRegistry(client)
            if name in GATEWAYS:
                await (gateway := SchedulerClient(*parts, tiers, CLOCK, name)).start()
                stack.push_async_callback(gateway.close)
                continue
            driver = StepDriver(build_core(tiers, info), ModeledEngine(info, CLOCK.sleep))
            loops.append(build_loop(driver, *parts, SchedulerMetrics(CollectorRegistry(), tiers), CLOCK, identity))
            running.create_task(loops[-1].run())
            await asyncio.sleep(1 / workers)  # they do not all read and write at once
        await asyncio.sleep(1)
        before_s = await cpu_s(client)
        await asyncio.sleep(seconds)
        share = (await cpu_s(client) - before_s) / seconds
        for loop in loops:
            loop.stop()
    return share


async def put(queue: RedisQueue, gateway: str, gap_s: float, seconds: float, counts: Counter[str]) -> None:
    begun_s, sampling = CLOCK.now(), SamplingParams(max_tokens=NUM_TOKENS)
    for number in range(int(seconds / gap_s)):
        await asyncio.sleep(begun_s + number * gap_s - CLOCK.now())
        now_ms = CLOCK.wall_ms()
        request = Request(f"{gateway}-{number}", "bulk", (7,) * 128, sampling, now_ms, now_ms + 1000, gateway)
        await queue.put([request], 20_000, AHEAD, 2**30)
        counts["puts"] += 1


async def listen(channel: RedisEventChannel, gateway: str, counts: Counter[str]) -> None:
    async for events in channel.listen(gateway):
        counts.update(messages=1, ends=sum(event.is_last for event in events))


async def work(queue: RedisQueue, channel: RedisEventChannel, step_s: float, counts: Counter[str]) -> None:
    """Claim when woken and where there is room; in each step, publish a token of each request, and end some."""
    held: dict[Lease, tuple[str, int]] = {}  # the gateway and the tokens of each request
    due_s, waits = CLOCK.now() + step_s, False
    while True:
        if not waits and (room := BATCH - len(held)):
            claimed = await queue.claim({"bulk": room}, 60.0, len(held))
            held |= {Lease(c.request.id, c.fence): (c.request.reply_to, 0) for c in claimed}
            counts["claims"] += 1
            waits = len(claimed) < room
        if await queue.wait_for_work(max(0.0, due_s - CLOCK.now())):
            waits = False
            continue
        waits = waits and len(held) < BATCH
        await step(queue, channel, held)
        due_s = CLOCK.now() + step_s


async def step(queue: RedisQueue, channel: RedisEventChannel, held: dict[Lease, tuple[str, int]]) -> None:
    events: defaultdict[str, list[TokenEvent]] = defaultdict(list)
    ended = [lease for lease, (_, index) in held.items() if index == NUM_TOKENS - 1]
    for lease, (gateway, index) in held.items():
        kind, reason = (EventKind.FINISHED, FinishReason.LENGTH) if lease in ended else (EventKind.TOKENS, None)
        events[gateway].append(TokenEvent(lease.request_id, kind, index, (7,), reason, fence=lease.fence))
        held[lease] = (gateway, index + 1)
    for gateway, message in events.items():
        await channel.publish(gateway, message)
    await queue.ack(ended)
    for lease in ended:
        del held[lease]


async def death_ms(url: str, worker: str) -> float:
    """Return the store's ms for the requeue of `worker`, while `LEASES` are held in all."""
    async with connection.connect(url) as client, AsyncExitStack() as stack:
        await client.flushall()
        for number in range(LEASES // LEASES_EACH):
            stack.push_async_callback((queue := RedisQueue(client, CLOCK, f"w{number}#1")).close)
            names, sampling = (f"{number}-{n}" for n in range(LEASES_EACH)), SamplingParams(max_tokens=1)
            await queue.put([Request(name, "bulk", (1,), sampling, 0, 0, "gateway") for name in names])
            await queue.claim({"bulk": LEASES_EACH}, 600.0)
        await queue.requeue_worker("another")  # loads the script
        await client.config_resetstat()
        await queue.requeue_worker(worker)
        return float((await client.info("commandstats"))["cmdstat_evalsha"]["usec"]) / 1000
