"""`python -m bench store`: the store's CPU time for idle workers, for requests on their way, and for a dead worker.

Idle workers and gateways have the product's own loops; those of the loads have its queue and events. All figures are of
the store's process. At fewer requests a second than the goal's, its caches are colder.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry
from pydantic import BaseModel, Field
from redis.asyncio import Redis

from bench.store.load import CLOCK, GATEWAYS, GOAL_PER_S, Load
from engine.interface import SamplingParams
from engine.modeled.engine import ModeledEngine
from loadtest.reporting.record import Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import one_sentence
from loadtest.simulation.cost_card import load_cost_card
from loadtest.simulation.deployment import build_core
from scheduler.client.client import SchedulerClient
from scheduler.config import load_tiers, shipped_tiers_path
from scheduler.drivers.steps.driver import StepDriver
from scheduler.events.redis import RedisEventChannel
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.request import Request
from scheduler.store import connection
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import build_loop
from scheduler.worker.metrics import SchedulerMetrics
from tidegate.valkey import ValkeyError, running_valkey

LEASES, LEASES_EACH = 25_600, 256
GOAL_US = 0.7e6 / GOAL_PER_S  # of a request: at most 70 % of a core at the goal's rate


class Store(BaseModel):
    """The CPU time of a real store: for idle workers, for each request, and when a worker dies beside many leases."""

    workers: int = Field(100, ge=1, le=1000, description="Idle workers.")
    seconds: float = Field(10.0, gt=0, description="Seconds of each measurement.")
    rate: float = Field(1000.0, gt=0, description="Requests put in a second, besides as many as go, up to the goal.")

    def cli_cmd(self) -> None:
        with (
            one_sentence(ValkeyError, OSError, said_by="store"),
            tempfile.TemporaryDirectory() as folder,
            running_valkey(Path(folder)) as url,
        ):
            publish(self.measure(url))

    def measure(self, url: str) -> Record:
        idle = asyncio.run(idle_share(url, self.workers, self.seconds))
        loads = [Load(url, self.rate, self.seconds), Load(url, self.rate, self.seconds, prefers=True)]
        loads.append(Load(url, GOAL_PER_S, self.seconds))
        for load in loads:
            load.run()
        rows = [
            (f"{self.workers} idle workers, {len(GATEWAYS)} gateways", f"{100 * idle:.1f} % of a core", "2 %"),
            *(_request_row(load) for load in loads),
            ("claims a put", f"{loads[0].counts['claims'] / loads[0].counts['puts']:.2f}", "2"),
            (f"a dead worker without leases, of {LEASES}", f"{asyncio.run(death_ms(url, 'none')):.2f} ms", "1 ms"),
            (f"a dead worker with {LEASES_EACH} of them", f"{asyncio.run(death_ms(url, 'w0')):.2f} ms", ""),
        ]
        return Record(sections=[Section(table=Table.of(("what", "the store's time", "goal"), rows))])


def _request_row(load: Load) -> tuple[str, str, str]:
    what = f"a request at {load.counts['puts'] / load.took_s:.0f}/s: put, claim, events, ack"
    what += "; each prefers a worker" if load.prefers else ""
    return what, f"{1e6 * load.cpu_s / load.counts['puts']:.0f} us", f"{GOAL_US:.0f} us"


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
