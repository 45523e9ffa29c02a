"""A worker's heartbeat: its identity, held requests, rates and metrics, and what its controller does and why.

Knows the registry and the data to send; makes no decisions. A worker without heartbeats counts as dead after a few
seconds.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from engine.interface import EngineInfo
from engine.step_time.ewma import Ewma
from scheduler.clock import Clock
from scheduler.holdings.capacity import CapacityEstimator
from scheduler.holdings.report import Ended
from scheduler.holdings.spare_share import SpareShare
from scheduler.holdings.status import CoreStatus
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.worker_status import GpuStatus, TierCapacity, TierStatus, WorkerStatus
from scheduler.worker.core import WorkerCore
from scheduler.worker.metrics import SchedulerMetrics

ReadGpus = Callable[[], tuple[GpuStatus, ...]]

RATE_WEIGHT = 0.2  # weight of the newest interval in the average rate of finished requests


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    worker_id: str
    model_names: tuple[str, ...]
    started_ms: int


class Heartbeat:
    """Announces one worker to the registry.

    Keeps the rates of finished requests, from which admission computes Retry-After.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        metrics: SchedulerMetrics,
        core: WorkerCore,
        engine: EngineInfo,
        identity: WorkerIdentity,
        clock: Clock,
        unsupported: Collection[str] = (),
        read_gpus: ReadGpus | None = None,
    ) -> None:
        """`unsupported` are the sampling parameters that the engine cannot honour. `read_gpus` returns its GPUs."""
        self._unsupported = tuple(sorted(unsupported))
        self._registry = registry
        self._metrics = metrics
        self._core = core
        self._engine = engine
        self._identity = identity
        self._clock = clock
        self._capacity = CapacityEstimator(engine)
        self._left_shares = SpareShare()
        self._finished: Counter[str] = Counter()  # number of finished requests by tier, since the last heartbeat
        self._finished_per_s: dict[str, Ewma] = {}  # average rate of finished requests, by tier
        self._last_s: float | None = None
        self._computed_s = 0.0  # engine time until the last heartbeat
        self._read_gpus = read_gpus

    def count_ended(self, end: Ended) -> None:
        self._finished[end.tier] += 1
        self._capacity.note_ended(end)

    async def beat(self) -> None:
        now, wall_ms = self._clock.now(), self._clock.wall_ms()
        interval_s = max(now - self._last_s, 1e-3) if self._last_s is not None else 1.0
        self._last_s = now
        status = self._core.status(now)
        capacities = self._capacity.measure(self._core.held.tiers, self._core.held.states, status, interval_s)
        if status.interactive_s is not None:
            self._left_shares.add(status.interactive_s, interval_s)
        tiers = {tier: self._tier(tier, status, capacities[tier], interval_s) for tier in capacities}
        self._finished.clear()
        sla_json = msgspec.json.encode(self._explanation(status, now, wall_ms)).decode()
        gpus = self._read_gpus() if self._read_gpus is not None else ()
        announced = self._status(tiers, wall_ms, status.kv_usage, self._busy(status, interval_s), gpus)
        await self._registry.announce(announced, self._metrics.text(), sla_json)

    async def withdraw(self) -> None:
        """Remove the worker from the registry."""
        await self._registry.withdraw(self._identity.worker_id)

    def _busy(self, status: CoreStatus, interval_s: float) -> float:
        """Return the share of the interval in which the engine computed, also what was thrown away."""
        computed_s = sum(status.used_s.values()) + status.wasted_s
        since_s, self._computed_s = computed_s - self._computed_s, computed_s
        return min(1.0, since_s / interval_s)

    def _explanation(self, status: CoreStatus, now: float, wall_ms: int) -> dict[str, Any]:
        """Return what the controller does and why, for `/admin/sla`. `at_ms` is the time of this report."""
        explained = self._core.explain(now)
        for tier, report in explained["tiers"].items():
            report["requests"] = asdict(status.held[tier])
            report["engine_s"] = status.used_s.get(tier, 0.0)
        return {
            "at_ms": wall_ms,
            "kv_usage": status.kv_usage,
            "step_time_error": status.step_time_error,
            **explained,
            "step_cost": asdict(status.step_cost),
        }

    def _tier(self, tier: str, status: CoreStatus, capacity: TierCapacity, interval_s: float) -> TierStatus:
        rate_per_s = self._finished[tier] / interval_s
        average = self._finished_per_s.setdefault(tier, Ewma(RATE_WEIGHT, rate_per_s))
        held, output = status.held[tier], status.outputs[tier]
        return TierStatus(
            queued=held.waiting,
            running=held.running + held.paused,
            batch_size=output.batch_size,
            max_wait_ms=output.max_wait_s * 1000,
            finished_per_s=average.add(rate_per_s),
            capacity=capacity,
        )

    def _status(
        self, tiers: dict[str, TierStatus], wall_ms: int, kv_usage: float, busy: float, gpus: tuple[GpuStatus, ...]
    ) -> WorkerStatus:
        return WorkerStatus(
            worker_id=self._identity.worker_id,
            model_names=self._identity.model_names,
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
            started_ms=self._identity.started_ms,
            eos_token_ids=self._engine.eos_token_ids,
            device=self._engine.device,
            tiers=tiers,
            at_ms=wall_ms,
            unsupported=self._unsupported,
            busy=busy,
            kv_usage=kv_usage,
            gpus=gpus,
            left_shares=self._left_shares.shares,
        )
