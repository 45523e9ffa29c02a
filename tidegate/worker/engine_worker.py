"""The process of a worker with an engine, or in front of a server: it serves requests."""

import asyncio
import contextlib
import gc
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import structlog
from redis.asyncio import Redis

from engine.config import EngineConfig, EngineKind, EngineStartError
from engine.factory import build_engine
from engine.interface import Engine, EngineDead, PlanError
from gateway.requests.tokens.model_files import kind_of
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import StepCore
from scheduler.drivers.steps.driver import StepDriver
from scheduler.drivers.steps.step_log import open_step_log
from scheduler.drivers.steps.warmup import warm_up
from scheduler.drivers.streams.core import StreamCore
from scheduler.drivers.streams.driver import StreamDriver
from scheduler.events.redis import RedisEventChannel
from scheduler.holdings.holdings import Holdings
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.worker.driver import Driver
from scheduler.worker.heartbeat import ReadGpus
from scheduler.worker.loop import WorkerLoop, build_loop
from scheduler.worker.metrics import SchedulerMetrics
from tidegate.logs import is_for_people
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.process import SWITCH_INTERVAL_S, signals_call
from tidegate.worker.gpu import gpu_reader
from tidegate.worker.process import WorkerProcess, run_process, serve_loops
from tidegate.worker.start_progress import StartProgress

if TYPE_CHECKING:
    from engine.upstream.connect import UpstreamConfig

log = structlog.get_logger()


def run_worker(settings: WorkerSettings) -> int:
    """Run the worker until SIGTERM or SIGINT. Return the exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    def serve(process: WorkerProcess) -> None:
        if settings.engine == "openai":
            asyncio.run(_serve_upstream(process))
            return
        on_terminal = sys.stderr.isatty() and is_for_people(settings.log_format)
        with (
            StartProgress(process.identity.worker_id, settings.store_url, on_terminal) as progress,
            # Modules stay for good. Without them, the collection before the worker serves takes 0.3 s less.
            contextlib.closing(build_engine(engine_config(settings), progress, when_imported=gc.freeze)) as engine,
        ):
            asyncio.run(_serve(process, engine, progress))

    return run_process(settings, serve)


def engine_config(settings: WorkerSettings) -> EngineConfig:
    """Return the options of the engine that computes on this machine.

    Raises `EngineStartError` if it is no engine for models of this kind.
    """
    kind = settings.kind or kind_of(settings.model_path)
    engine: EngineKind = "native" if settings.engine == "openai" or settings.engine == "static" else settings.engine
    if kind != "chat" and engine != "embedding":
        way = f"start its worker with --engine embedding, or say kind: {kind} in the file of --models"
        raise EngineStartError(f"{settings.model_path} is of the kind {kind}: {way}")
    return EngineConfig(
        model=settings.model_path,
        load_format=settings.load_format,
        dtype=settings.dtype,
        quantize=settings.quantize,
        device=settings.device,
        max_model_len=settings.max_model_len,
        max_step_tokens=settings.max_step_tokens,
        kv_cache_bytes=settings.kv_cache_mb * 2**20 if settings.kv_cache_mb else None,
        kv_cache_dtype=settings.kv_cache_dtype,
        swap_bytes=None if settings.swap_mb is None else settings.swap_mb * 2**20,
        prefix_cache=settings.prefix_cache,
        speculate=settings.speculate,
        exact=settings.exact,
        num_threads=settings.threads,
        cuda_graphs=settings.cuda_graphs,
        optimize=settings.optimize,
        engine=engine,
        kind=kind,
        vllm_args=settings.vllm_args or "",
        adapters=tuple(settings.adapter_paths.items()),
    )


def upstream_config(settings: WorkerSettings) -> "UpstreamConfig":
    """Return where the server is that computes the tokens, and what is known of it."""
    from engine.upstream.connect import UpstreamConfig  # with an HTTP client, which other workers need not load

    key = settings.upstream_api_key
    return UpstreamConfig(
        url=settings.upstream or "",
        model_path=settings.model_path,
        dialect=settings.upstream_dialect,
        model=settings.upstream_model,
        api_key=key.get_secret_value() if key is not None else "",
        max_model_len=settings.max_model_len,
        kind=settings.kind or kind_of(settings.model_path),
        takes_images=settings.image_tokens > 0,
    )


async def _serve(process: WorkerProcess, engine: Engine, progress: StartProgress) -> None:
    settings, clock, runner = process.settings, process.clock, process.runner
    controller = SLAController(process.tiers, engine.info.num_layers, suspends_steps=engine.info.suspends_steps)
    worker_id = process.identity.worker_id
    core = StepCore(process.tiers, engine.info, controller, worker_id=worker_id, draw=random.Random(worker_id).random)
    with signals_call(runner.end), open_step_log(settings.step_log, engine.info) as step_log:
        with progress.phase("measuring steps"):
            await teach(engine, core, clock)
        await asyncio.to_thread(progress.close)
        read_gpus = gpu_reader(engine.info.device, _gpu_index(settings))
        log.info("the worker serves", step_cost=asdict(core.status(clock.now()).step_cost))
        driver = partial(StepDriver, core, engine, step_log)
        await _serve_requests(process, core.held, driver, lambda: runner.is_stuck, read_gpus)


def _gpu_index(settings: WorkerSettings) -> int | None:
    """Return which of the visible GPUs the engine uses; None for vLLM, which chooses by itself and may use several."""
    return int(settings.device.partition(":")[2] or 0) if settings.engine in ("native", "embedding") else None


async def _serve_upstream(process: WorkerProcess) -> None:
    """Serve with the tokens of another server. While it is away, the worker lives and waits for it."""
    from engine.upstream.connect import connect

    settings = process.settings
    upstream = await connect(upstream_config(settings))
    core = StreamCore(
        process.tiers,
        upstream,
        SLAController(process.tiers),
        max_in_flight=settings.upstream_max_in_flight,
        stall_s=settings.upstream_stall_s,
        worker_id=process.identity.worker_id,
    )
    with signals_call(process.runner.end):
        await _serve_requests(process, core.held, partial(StreamDriver, core, upstream), lambda: False)


async def _serve_requests(
    process: WorkerProcess,
    held: Holdings,
    make_driver: Callable[[], Driver],
    is_stuck: Callable[[], bool],
    read_gpus: ReadGpus | None = None,
) -> None:
    """Serve with a new driver in each loop. `is_stuck` says whether the supervisor should replace this process."""
    clock, identity, tracing = process.clock, process.identity, process.tracing
    metrics = SchedulerMetrics(process.registry, process.tiers)
    tracer = tracing.requests_of(identity.worker_id) if tracing is not None else None

    def build(redis: Redis) -> WorkerLoop:
        queue = RedisQueue(redis, clock, identity.holder)
        events, registry = RedisEventChannel(redis), RedisWorkerRegistry(redis)
        return build_loop(make_driver(), queue, events, registry, metrics, clock, identity, read_gpus, tracer)

    await serve_loops(process, WorkerTiers(held, metrics), build, is_stuck)


class WorkerTiers:
    """Applies changed tiers to a worker. Implements `scheduler.reload.follower.TierConsumer`."""

    def __init__(self, held: Holdings, metrics: SchedulerMetrics) -> None:
        self._held = held
        self._metrics = metrics

    def objection(self, tiers: TierSet) -> str:
        """Return why the worker cannot use `tiers`; an empty string if it can.

        The worker cannot remove a tier whose requests it holds.
        """
        for name in sorted({tier.name for tier in self._held.tiers} - set(tiers.tiers)):
            if held := self._held.table.count(name):
                return f"The tier {name!r} cannot be removed: requests of it are under way here ({held})."
        return ""

    def reconfigure(self, tiers: TierSet) -> None:
        self._held.reconfigure(tiers)
        self._metrics.reconfigure(tiers)


async def teach(engine: Engine, core: StepCore, clock: Clock) -> None:
    """Run synthetic steps on the engine, from which the core learns how long steps take.

    Raises `EngineStartError` if a step fails, because such an engine could not serve requests either.
    """
    try:
        await warm_up(engine, core.observe_step_time, clock)
    except (EngineDead, PlanError) as error:
        raise EngineStartError(f"the engine's first steps failed: {error}") from error
