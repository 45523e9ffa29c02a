"""The process of a worker with a static endpoint: it serves /v1/tasks, and has no model.

A function that hangs ends the process, so that a supervisor starts a new one: the tasks of its call are tried again.
"""

import asyncio

import structlog
from redis.asyncio import Redis

from engine.static.factory import open_endpoint
from scheduler.config import TierSet
from scheduler.drivers.calls.driver import build_call_loop
from scheduler.drivers.calls.metrics import TaskMetrics
from scheduler.drivers.calls.policy import BatchPolicy
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.tasks.queue import TaskQueue
from scheduler.worker.loop import WorkerLoop
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.process import signals_call
from tidegate.worker.process import WorkerProcess, run_process, serve_loops

log = structlog.get_logger()


def run_static_worker(settings: WorkerSettings) -> int:
    """Run the worker until SIGTERM or SIGINT. Return the exit code."""
    return run_process(settings, lambda process: asyncio.run(_serve(process)))


async def _serve(process: WorkerProcess) -> None:
    settings, clock, identity, tracing = process.settings, process.clock, process.identity, process.tracing
    endpoint = open_endpoint(settings.endpoint or "", settings.batch, settings.endpoint_timeout_s)
    tracer = tracing.tasks_of(identity.worker_id, endpoint.name) if tracing is not None else None
    policy = BatchPolicy(process.tiers, settings.batch, clock.now())
    metrics = TaskMetrics(process.registry, process.tiers)

    def build(redis: Redis) -> WorkerLoop:
        queue, registry = TaskQueue(redis, clock, identity.holder), RedisWorkerRegistry(redis)
        return build_call_loop(endpoint, policy, queue, registry, metrics, clock, identity, tracer)

    with signals_call(process.runner.end):
        log.info("the worker serves", endpoint=endpoint.name, batch=settings.batch)
        try:
            await serve_loops(process, StaticWorkerTiers(policy, metrics), build, lambda: process.runner.is_stuck)
        finally:
            await endpoint.close()


class StaticWorkerTiers:
    """Applies changed tiers to a worker with a static endpoint. Implements `scheduler.reload.follower.TierConsumer`."""

    def __init__(self, policy: BatchPolicy, metrics: TaskMetrics) -> None:
        self._policy = policy
        self._metrics = metrics

    def objection(self, tiers: TierSet) -> str:
        """Return why the worker cannot use `tiers`; an empty string if it can.

        A tier with waiting tasks cannot be removed.
        """
        for name in sorted(self._policy.waiting_tiers - set(tiers.tiers)):
            return f"The tier {name!r} cannot be removed: tasks of it wait."
        return ""

    def reconfigure(self, tiers: TierSet) -> None:
        self._policy.reconfigure(tiers)
        self._metrics.reconfigure(tiers)
