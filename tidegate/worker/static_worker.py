"""The process of a worker with a static endpoint: it serves /v1/tasks, and has no model.

A function that hangs ends the process, so that a supervisor starts a new one: the tasks of its call are tried again.
"""

import asyncio
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from engine.static.factory import open_endpoint
from engine.static.interface import Endpoint
from scheduler.clock import SystemClock
from scheduler.config import TierSet
from scheduler.drivers.calls.driver import build_call_loop
from scheduler.drivers.calls.metrics import TaskMetrics
from scheduler.drivers.calls.policy import BatchPolicy
from scheduler.drivers.calls.results import TaskTracer
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.tasks.queue import TaskQueue
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import WorkerLoop
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.process import signals_call
from tidegate.worker.process import LoopRunner, run_process, serve_loops

if TYPE_CHECKING:
    from tidegate.tracing.exporter import Tracing

log = structlog.get_logger()


def run_static_worker(settings: WorkerSettings) -> int:
    """Run the worker until SIGTERM or SIGINT. Return the exit code."""

    def serve(tiers: TierSet, identity: WorkerIdentity, tracing: "Tracing | None") -> None:
        endpoint = open_endpoint(settings.endpoint or "", settings.batch, settings.endpoint_timeout_s)
        tracer = tracing.tasks_of(identity.worker_id, endpoint.name) if tracing is not None else None
        asyncio.run(_serve(settings, tiers, endpoint, identity, tracer))

    return run_process(settings, serve)


async def _serve(
    settings: WorkerSettings, tiers: TierSet, endpoint: Endpoint, identity: WorkerIdentity, tracer: TaskTracer | None
) -> None:
    clock = SystemClock()
    policy = BatchPolicy(tiers, settings.batch, clock.now())
    metrics = TaskMetrics(CollectorRegistry(), tiers)
    runner = LoopRunner(settings.drain_s)

    def build(redis: Redis) -> WorkerLoop:
        queue, registry = TaskQueue(redis, clock, identity.worker_id), RedisWorkerRegistry(redis)
        return build_call_loop(endpoint, policy, queue, registry, metrics, clock, identity, tracer)

    with signals_call(runner.end):
        log.info("the worker serves", endpoint=endpoint.name, batch=settings.batch)
        consumer = StaticWorkerTiers(policy, metrics)
        try:
            await serve_loops(settings, tiers, consumer, build, runner, lambda: runner.is_stuck, clock, identity)
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
