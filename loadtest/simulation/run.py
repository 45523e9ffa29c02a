"""One simulated run: a deployment, the traffic that is sent to it, and a snapshot once a second.

The same setting, traffic and seed always give exactly the same observation. Knows virtual time; does not read a real
clock.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from loadtest.simulation.clients import SimulatedClients
from loadtest.simulation.deployment import Deployment, Setting
from loadtest.simulation.observation import Moment, Observation, TierMoment
from loadtest.simulation.scaling import follow_signal
from loadtest.simulation.traffic import Traffic
from scheduler.virtual_time import run_virtual

DRAIN_S = 120.0  # seconds that requests have to finish after the load, by default
MOMENT_S = 1.0  # seconds between two snapshots


def simulate(
    setting: Setting,
    traffic: Traffic,
    duration_s: float,
    *,
    drain_s: float = DRAIN_S,
    gather_s: float = 0.0,
    show: Callable[[float], None] = lambda now_s: None,
) -> Observation:
    """Send `traffic` for `duration_s`, then let requests finish for up to `drain_s`. Return the observation.

    `show` is told the virtual seconds since the load began, once in each of them.
    """
    return run_virtual(_run(setting, traffic, duration_s, drain_s, gather_s, show))


async def _run(
    setting: Setting,
    traffic: Traffic,
    duration_s: float,
    drain_s: float,
    gather_s: float,
    show: Callable[[float], None],
) -> Observation:
    observation = Observation(duration_s, traffic.classes)
    deployment = Deployment(setting, observation)
    await deployment.start()
    clients = SimulatedClients(deployment, observation, gather_s)
    load = asyncio.create_task(_load(clients, deployment, traffic, observation, drain_s))
    watch = asyncio.create_task(_watch(deployment, observation, show))
    beside = [watch]
    if setting.scaling is not None:
        beside.append(asyncio.create_task(follow_signal(deployment, setting.workers, setting.scaling)))
    await _until_done(load, [*beside, deployment.failed])
    for task in beside:
        task.cancel()
    await deployment.end()
    return observation


async def _load(
    clients: SimulatedClients, deployment: Deployment, traffic: Traffic, observation: Observation, drain_s: float
) -> None:
    clients.fill(traffic)
    await deployment.clock.sleep(deployment.begins_s - deployment.clock.now())
    for worker in deployment.workers:
        worker.record.clear()
    await clients.offer(traffic.arrivals, observation.duration_s)
    observation.engines = [replace(worker.record) for worker in deployment.workers]
    for worker in deployment.workers:
        observation.preemptions.update(worker.core.planner.preemptions)
    await clients.finish(drain_s)


async def _until_done(load: "asyncio.Task[None]", others: "list[asyncio.Future[None]]") -> None:
    """Wait until the load ends. Raises its error, or that of another one, which only an error ends."""
    await asyncio.wait({load, *others}, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        if other.done():
            load.cancel()
            other.result()
    load.result()


async def _watch(deployment: Deployment, observation: Observation, show: Callable[[float], None]) -> None:
    await deployment.clock.sleep(deployment.begins_s - deployment.clock.now())
    busy_s = 0.0
    while True:
        num_workers = sum(worker.is_present for worker in deployment.workers)
        await deployment.clock.sleep(MOMENT_S)
        now_busy_s = sum(worker.record.busy_s for worker in deployment.workers)
        share, busy_s = (now_busy_s - busy_s) / (MOMENT_S * num_workers), now_busy_s
        observation.moments.append(await _snapshot(deployment, share, num_workers))
        show(deployment.clock.now() - deployment.begins_s)


async def _snapshot(deployment: Deployment, busy_share: float, num_workers: int) -> Moment:
    now = deployment.clock.now()
    cores = [worker.core for worker in deployment.workers if worker.is_present]
    statuses = [core.status(now) for core in cores]
    outputs = statuses[0].outputs
    depths = await deployment.queue.depths(list(deployment.tiers.tiers))
    tiers = {
        name: TierMoment(
            queued=depths[name],
            held=sum(core.held.table.count(name) for core in cores),
            batch_size=outputs[name].batch_size,
            max_wait_s=outputs[name].max_wait_s,
            margin=outputs[name].margin,
        )
        for name in deployment.tiers.tiers
    }
    kv_usage = max(status.kv_usage for status in statuses)
    error = sum(status.step_time_error for status in statuses) / len(statuses)
    return Moment(now - deployment.begins_s, busy_share, kv_usage, error, tiers, num_workers)
