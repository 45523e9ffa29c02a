"""The process of a worker with a static endpoint: it serves /v1/tasks, and has no model.

Exit codes are those of `tidegate.worker`. A function that hangs ends the process, so that a supervisor starts a new
one: the tasks of its call are tried again.
"""

import asyncio
import os
import socket

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics
from redis.exceptions import RedisError

from engine.config import EngineStartError
from engine.static.factory import open_endpoint
from engine.static.interface import Endpoint, EndpointHangs
from scheduler.clock import SystemClock
from scheduler.config import TierConfigError, TierSet, load_tiers
from scheduler.drivers.calls.heartbeat import TaskHeartbeat
from scheduler.drivers.calls.loop import BatchLoop
from scheduler.drivers.calls.metrics import TaskMetrics
from scheduler.drivers.calls.policy import BatchPolicy
from scheduler.drivers.calls.tracing import TaskTracer
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.reload.coordinator import TierChanges
from scheduler.reload.follower import TierFollower
from scheduler.reload.store import TierStore
from scheduler.store import connection
from scheduler.tasks.queue import TaskQueue
from tidegate.background import Background
from tidegate.notify import report_life
from tidegate.process import freeze_heap, hangup_calls, ignore_hangup, signals_call, worker_name
from tidegate.settings import WorkerSettings
from tidegate.supervisor import EX_CONFIG
from tidegate.tracing.start import TracingError, traced
from tidegate.worker import LoopRunner, keep_serving

log = structlog.get_logger()


def run_static_worker(settings: WorkerSettings) -> int:
    """Run the worker until SIGTERM or SIGINT. Return the exit code."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # else every counter has a second series
    ignore_hangup()
    try:
        tiers = load_tiers(settings.tiers_path)
        endpoint = open_endpoint(settings.endpoint or "", settings.batch, settings.endpoint_timeout_s)
        worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        with traced("worker", worker_id, settings.otel) as tracing:
            tracer = tracing.tasks_of(worker_id, endpoint.name) if tracing is not None else None
            asyncio.run(_serve(settings, tiers, endpoint, worker_id, tracer))
        return 0
    except (EngineStartError, TierConfigError, TracingError) as error:
        log.error("the worker cannot start", reason=str(error))
        return EX_CONFIG
    except KeyboardInterrupt:
        log.info("the worker was interrupted before it served")
        return 0
    except EndpointHangs as error:
        log.error("the endpoint hangs; the worker ends, and its tasks are tried again", reason=str(error))
    except RedisError as error:
        log.error("the store does not answer", reason=str(error))
    except Exception:
        log.exception("the worker died")
    return 1


async def _serve(
    settings: WorkerSettings, tiers: TierSet, endpoint: Endpoint, worker_id: str, tracer: TaskTracer | None
) -> None:
    clock = SystemClock()
    policy = BatchPolicy(tiers, settings.batch, clock.now())
    metrics = TaskMetrics(CollectorRegistry(), tiers)
    runner = LoopRunner(settings.drain_s)
    with signals_call(runner.end):
        async with connection.connect(str(settings.redis_url)) as redis:
            tier_store = TierStore(redis)
            consumer = StaticWorkerTiers(policy, metrics)
            follower = TierFollower(tier_store, consumer, worker_name(worker_id), tiers, settings.tiers_path, clock)
            changes = TierChanges(tier_store, follower, RedisQueue(redis, clock).depths, settings.tiers_path, clock)

            def build() -> BatchLoop:
                queue, registry = TaskQueue(redis, clock, worker_id), RedisWorkerRegistry(redis)
                beat = TaskHeartbeat(registry, queue, metrics, clock, worker_id, endpoint.name, settings.batch)
                return BatchLoop(endpoint, policy, queue, beat, metrics, clock, worker_id, tracer)

            freeze_heap()
            log.info("the worker serves", endpoint=endpoint.name, batch=settings.batch)
            background = Background()
            with hangup_calls(lambda: background.start(changes.reload_on_signal()), runner.end):
                async with follower, background:
                    background.start(report_life(lambda: runner.is_announced, lambda: runner.is_stuck))
                    try:
                        await keep_serving(build, runner, clock)
                    finally:
                        await endpoint.close()
    log.info("the worker has drained")


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
