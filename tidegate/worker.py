"""The worker process: one engine, one scheduler loop, until a signal drains it.

Exit codes: 0 after a drain; 78 when the engine cannot start (trying again will not help); 1 when something broke, so
that a supervisor starts a new one. What it held is requeued by its successor, or when its leases lapse.
"""

import asyncio
import os
import signal
import socket
import sys

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.config import EngineConfig, EngineStartError
from engine.interface import Engine
from scheduler import store
from scheduler.clock import Clock, SystemClock
from scheduler.config import TierConfigError, TierSet, load_tiers
from scheduler.core import SchedulerCore
from scheduler.events.redis import RedisEventChannel
from scheduler.heartbeat import WorkerIdentity
from scheduler.loop import SchedulerLoop
from scheduler.metrics import SchedulerMetrics
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.sla import SLAController
from scheduler.warmup import warm_up
from tidegate.settings import WorkerSettings
from tidegate.supervisor import EX_CONFIG

log = structlog.get_logger()

SWITCH_INTERVAL_S = 0.0005  # the engine's thread must not wait 5 ms (the default) for the interpreter's lock


def run_worker(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside every counter
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        tiers = load_tiers(settings.tiers_path)
        engine = _start_engine(settings)
    except (EngineStartError, TierConfigError) as error:
        log.error("the worker cannot start", reason=str(error))
        return EX_CONFIG
    try:
        return asyncio.run(_serve(settings, tiers, engine))
    except (RedisError, OSError) as error:
        log.error("the store does not answer", reason=str(error))
    except Exception:
        log.exception("the worker died")
    finally:
        engine.close()
    return 1


def _start_engine(settings: WorkerSettings) -> Engine:
    from engine.factory import build_engine  # torch: only a worker pays for it

    config = EngineConfig(
        model=settings.model_path,
        load_format=settings.load_format,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        max_step_tokens=settings.max_step_tokens,
        kv_cache_bytes=settings.kv_cache_mb * 2**20 if settings.kv_cache_mb else None,
        num_threads=settings.threads,
    )
    return build_engine(config)


async def _serve(settings: WorkerSettings, tiers: TierSet, engine: Engine) -> int:
    clock = SystemClock()
    core = SchedulerCore(tiers, engine.info, SLAController(tiers))
    await warm_up(engine, core.step_time, clock)
    redis = store.connect(str(settings.redis_url))
    loop = build_loop(settings, core, engine, redis, tiers, clock)
    _drain_on_signals(loop, settings.drain_s)
    log.info("the worker serves", step_cost=str(core.step_time.cost()))
    try:
        await loop.run()
    finally:
        await redis.aclose()
    log.info("the worker has drained")
    return 0


def build_loop(
    settings: WorkerSettings, core: SchedulerCore, engine: Engine, redis: Redis, tiers: TierSet, clock: Clock
) -> SchedulerLoop:
    """Wire the scheduler to Redis."""
    worker_id = settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    return SchedulerLoop(
        core=core,
        engine=engine,
        queue=RedisQueue(redis, clock, worker_id),
        events=RedisEventChannel(redis),
        registry=RedisWorkerRegistry(redis),
        metrics=SchedulerMetrics(CollectorRegistry(), tiers),
        clock=clock,
        identity=WorkerIdentity(worker_id, settings.model_names, clock.wall_ms()),
    )


def _drain_on_signals(loop: SchedulerLoop, drain_s: float) -> None:
    running = asyncio.get_running_loop()

    def drain() -> None:
        loop.drain()
        running.call_later(drain_s, loop.stop)  # what is left by then goes back to the queue

    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, drain)
