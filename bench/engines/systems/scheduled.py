"""Our engine driven by the scheduler loop: its speed with the cost of planning, the queue and token events.

Uses the real `WorkerLoop`, `StepCore` and `EngineThread`. Queue and events are in memory, so that no store is
measured. The one tier has no SLO, so that no step is kept short; the other systems have no SLOs either.
"""

import asyncio
from collections.abc import Sequence
from itertools import count

from prometheus_client import CollectorRegistry

from bench.engines.systems.direct import engine_config
from bench.engines.systems.offline import GenerationFailed
from bench.engines.systems.protocol import SystemSpec
from engine.factory import build_engine
from engine.interface import Engine, EngineInfo, SamplingParams
from loadtest.calibration.sweep import greedy
from scheduler.clock import SystemClock
from scheduler.config import TierSet, parse_tiers
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.core import StepCore
from scheduler.drivers.steps.driver import StepDriver
from scheduler.drivers.steps.warmup import warm_up
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.request import Request
from scheduler.worker.heartbeat import WorkerIdentity
from scheduler.worker.loop import WorkerLoop, build_loop
from scheduler.worker.metrics import SchedulerMetrics

TIER = "bulk"
GATEWAY = "benchmark"
DEADLINE_MS = 3_600_000  # an hour, so that no request is late


class LoopOverEngine:
    """The scheduler loop over an engine. `info` is what the scheduler is told of the engine."""

    def __init__(self, engine: Engine, info: EngineInfo, tiers: TierSet) -> None:
        self._engine = engine
        self._clock = SystemClock()
        self._queue = MemoryQueue(self._clock)
        self._events = MemoryEventChannel()
        self._tiers = tiers
        controller = SLAController(tiers, info.num_layers, suspends_steps=info.suspends_steps)
        self._core = StepCore(tiers, info, controller)
        self._numbers = count()
        self._asyncio = asyncio.Runner()
        self._asyncio.run(warm_up(self._engine, self._core.observe_step_time, self._clock))
        self._asyncio.run(self._events.open(GATEWAY))

    def sample(self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]) -> list[list[int]]:
        """Return the tokens of each prompt. All prompts are there from the start."""
        return self._asyncio.run(self._serve(prompts, samplings))

    def close(self) -> None:
        """Close the engine, too."""
        self._engine.close()
        self._asyncio.close()

    async def _serve(self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]) -> list[list[int]]:
        requests = [self._request(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
        loop = self._loop()
        try:
            async with asyncio.TaskGroup() as tasks:  # if the loop fails, the group ends the wait for its tokens
                tasks.create_task(loop.run())
                await self._queue.put(requests)
                outputs = await self._collect({r.id for r in requests})
                loop.drain()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        return [outputs[r.id] for r in requests]

    def _loop(self) -> WorkerLoop:
        identity = WorkerIdentity(GATEWAY, (self._engine.info.model_path,), self._clock.wall_ms())
        metrics = SchedulerMetrics(CollectorRegistry(), self._tiers)
        queue, registry = self._queue.for_worker(GATEWAY), MemoryWorkerRegistry(self._clock)
        return build_loop(
            StepDriver(self._core, self._engine), queue, self._events, registry, metrics, self._clock, identity
        )

    def _request(self, prompt: Sequence[int], sampling: SamplingParams) -> Request:
        now_ms = self._clock.wall_ms()
        request_id = f"benchmark-{next(self._numbers)}"
        tier, deadline_ms = self._tiers.default_tier, now_ms + DEADLINE_MS
        return Request(request_id, tier, tuple(prompt), sampling, now_ms, deadline_ms, GATEWAY)

    async def _collect(self, waiting: set[str]) -> dict[str, list[int]]:
        outputs: dict[str, list[int]] = {request_id: [] for request_id in waiting}
        async for events in self._events.listen(GATEWAY):
            for event in events:
                outputs[event.request_id].extend(event.token_ids)
                if event.error:
                    raise GenerationFailed(event.error)
                if event.is_last:
                    waiting.discard(event.request_id)
            if not waiting:
                break
        return outputs


class ScheduledEngine(LoopOverEngine):
    """Our engine with the loop around it, as one of the compared systems."""

    def __init__(self, spec: SystemSpec) -> None:
        engine = build_engine(engine_config(spec))
        super().__init__(engine, engine.info, one_tier(spec.max_num_seqs))

    @property
    def settings(self) -> str:
        return "the same engine on its thread behind WorkerLoop; queue and events in memory, one tier without SLO"

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[list[int]]:
        return self.sample(prompts, [greedy(count) for count in new_tokens])


def one_tier(max_num_seqs: int, **slo: float) -> TierSet:
    """Return one tier, which is interactive if it has an `slo`."""
    bounds = {"min": max_num_seqs, "start": max_num_seqs, "max": max_num_seqs}
    waits = {"min": 0, "start": 0, "max": 0}
    tier = {"priority": 10, "service_tiers": ["default"], "batch_size": bounds, "max_wait_ms": waits, "slo": slo}
    return parse_tiers({"default_tier": TIER, "batch_tier": TIER, "tiers": {TIER: tier}})
