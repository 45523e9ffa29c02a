"""A worker's heartbeat, and what a worker with requests says in it: identity, held requests, rates, and its controller.

Knows the registry and the data to send; makes no decisions. A worker without heartbeats counts as dead after a few
seconds.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec

from engine.interface import EngineInfo
from engine.step_time.ewma import Ewma
from engine.streaming import IMAGES
from scheduler.clock import Clock
from scheduler.holdings.capacity import CapacityEstimator, SpareShare
from scheduler.holdings.report import Ended
from scheduler.holdings.status import CoreStatus
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.heartbeat_monitor import CHECK_S, WORKER_SILENT_S, HeartbeatMonitor
from scheduler.registry.worker_status import GpuStatus, TierCapacity, TierStatus, WorkerStatus
from scheduler.store.keys import WORKER_TTL_S
from scheduler.worker.core import WorkerCore

ReadGpus = Callable[[], tuple[GpuStatus, ...]]

RATE_WEIGHT = 0.2  # weight of the newest interval in the average rate of what ends


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """`worker_id` is the same after a restart. `incarnation` is that of one process: a later one has a greater text."""

    worker_id: str
    model_names: tuple[str, ...]
    started_ms: int
    incarnation: str = ""
    page: str = ""  # URL of the worker's metrics
    vocabulary: str = ""  # of the worker's model, as `Request.vocabulary`; empty: unknown

    @property
    def holder(self) -> str:
        """The name under which this process holds leases: no two processes have the same, also with one id."""
        return f"{self.worker_id}#{self.incarnation}" if self.incarnation else self.worker_id


class DuplicateWorker(Exception):
    """Another live process has the same worker id, and was there before."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(
            f"another worker with the id {worker_id!r} is at work on this store; give each its own with --worker-id"
        )


class SelfReport(Protocol):
    """What a worker says of itself."""

    def read(self, now: float, wall_ms: int, interval_s: float) -> tuple[WorkerStatus, str]:
        """Return the status of the last `interval_s` seconds, and what the controller does (a JSON object)."""
        ...


class Heartbeat:
    """Announces one worker to the registry, and notices other processes with its id."""

    def __init__(
        self,
        registry: WorkerRegistry,
        report: SelfReport,
        clock: Clock,
        identity: WorkerIdentity,
    ) -> None:
        self._registry = registry
        self._report = report
        self._clock = clock
        self._identity = identity
        self._last_s: float | None = None
        self._announced_s = -math.inf  # time at which the store had the last heartbeat

    @property
    def is_known(self) -> bool:
        """Whether the store has a heartbeat of this worker that is not too old."""
        return self._clock.now() - self._announced_s < WORKER_TTL_S

    async def await_namesake(self) -> None:
        """Wait until no other process announces itself with this id: the one before it may have ended just now.

        Raises `DuplicateWorker` if such a process is alive.
        """
        monitor, first_ms = HeartbeatMonitor(WORKER_SILENT_S), None
        while (at_ms := await self._namesake_at_ms()) is not None and not monitor.observe({"": at_ms}):
            first_ms = at_ms if first_ms is None else first_ms
            if at_ms != first_ms:
                raise DuplicateWorker(self._identity.worker_id)
            await self._clock.sleep(CHECK_S)

    async def _namesake_at_ms(self) -> int | None:
        """Return the time of the newest heartbeat of another process with this id."""
        for status in await self._registry.workers():
            if status.worker_id == self._identity.worker_id and status.incarnation != self._identity.incarnation:
                return status.at_ms
        return None

    async def beat(self) -> None:
        """Announce the worker. Raises `DuplicateWorker` if an older process with its id has done so meanwhile."""
        now, wall_ms = self._clock.now(), self._clock.wall_ms()
        interval_s = max(now - self._last_s, 1e-3) if self._last_s is not None else 1.0
        is_first, self._last_s = self._last_s is None, now
        status, sla_json = self._report.read(now, wall_ms, interval_s)
        before = await self._registry.announce(status, sla_json)
        self._announced_s = self._clock.now()
        if not is_first and before and before < self._identity.incarnation:
            raise DuplicateWorker(self._identity.worker_id)

    async def withdraw(self) -> None:
        """Remove the worker from the registry."""
        self._announced_s = -math.inf
        await self._registry.withdraw(self._identity.worker_id)


class EndedRates:
    """The average rates of what has ended, by tier. Admission computes Retry-After from them."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # since the last update
        self._per_s: dict[str, Ewma] = {}

    def count(self, tier: str) -> None:
        self._ended[tier] += 1

    def update(self, tiers: Iterable[str], interval_s: float) -> Mapping[str, float]:
        """Return the rate per second of each of `tiers`, and of each in which something has ended."""
        for tier in {*tiers, *self._per_s, *self._ended}:
            rate_per_s = self._ended[tier] / interval_s
            self._per_s.setdefault(tier, Ewma(RATE_WEIGHT, rate_per_s)).add(rate_per_s)
        self._ended.clear()
        return {tier: average.value for tier, average in self._per_s.items()}


class RequestReport:
    """What a worker with requests says of itself."""

    def __init__(
        self,
        core: WorkerCore,
        engine: EngineInfo,
        identity: WorkerIdentity,
        unsupported: Collection[str] = (),
        read_gpus: ReadGpus | None = None,
    ) -> None:
        """`unsupported` are the options that the engine cannot honour. `read_gpus` returns its GPUs."""
        self._core = core
        self._engine = engine
        self._identity = identity
        self._unsupported = tuple(sorted({*unsupported, *(() if engine.takes_images else (IMAGES,))}))
        self._read_gpus = read_gpus
        self._capacity = CapacityEstimator(engine)
        self._spare_share = SpareShare()
        self._rates = EndedRates()
        self._computed_s = 0.0  # engine time until the last heartbeat

    def count_ended(self, end: Ended) -> None:
        self._rates.count(end.tier)
        self._capacity.note_ended(end)

    def read(self, now: float, wall_ms: int, interval_s: float) -> tuple[WorkerStatus, str]:
        status, held = self._core.status(now), self._core.held
        capacities = self._capacity.measure(held.tiers, held.states, status, interval_s)
        if status.interactive_s is not None:
            self._spare_share.add(status.interactive_s, interval_s)
        rates = self._rates.update(capacities, interval_s)
        tiers = {tier: _tier_status(tier, status, capacities[tier], rates[tier]) for tier in capacities}
        sla_json = msgspec.json.encode(self._explanation(status, now, wall_ms)).decode()
        return self._status(tiers, wall_ms, status.kv_usage, self._busy(status, interval_s)), sla_json

    def _busy(self, status: CoreStatus, interval_s: float) -> float:
        """Return the share of the interval in which the engine computed."""
        computed_s = sum(status.used_s.values())
        since_s, self._computed_s = computed_s - self._computed_s, computed_s
        return min(1.0, since_s / interval_s)

    def _explanation(self, status: CoreStatus, now: float, wall_ms: int) -> dict[str, Any]:
        """Return what the controller does and why, for `/admin/sla`. `at_ms` is the time of this report."""
        explained = self._core.explain(now)
        for tier, report in explained["tiers"].items():
            report["requests"] = asdict(status.held[tier])
            report["engine_s"] = status.used_s.get(tier, 0.0)
        for (tier, kind), slowdown in status.slowdowns.items():
            if tier in explained["tiers"]:
                found = explained["tiers"][tier].setdefault("bulk_slowdown", {})
                found[kind] = None if slowdown is None else asdict(slowdown)
        return {
            "at_ms": wall_ms,
            "kv_usage": status.kv_usage,
            "step_time_error": status.step_time_error,
            **explained,
            "step_cost": asdict(status.step_cost),
        }

    def _status(self, tiers: dict[str, TierStatus], wall_ms: int, kv_usage: float, busy: float) -> WorkerStatus:
        return WorkerStatus(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            page=self._identity.page,
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
            gpus=self._read_gpus() if self._read_gpus is not None else (),
            left_shares=self._spare_share.shares,
            interactive_share=self._spare_share.recent,
            caches_prefixes=self._engine.caches_prefixes,
        )


def _tier_status(tier: str, status: CoreStatus, capacity: TierCapacity, finished_per_s: float) -> TierStatus:
    held, output = status.held[tier], status.outputs[tier]
    return TierStatus(
        queued=held.waiting,
        running=held.running + held.paused,
        batch_size=output.batch_size,
        max_wait_ms=output.max_wait_s * 1000,
        finished_per_s=finished_per_s,
        capacity=capacity,
    )
