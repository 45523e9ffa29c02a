"""The metrics of a worker with a static endpoint, and what it says of itself in its heartbeats.

The registry of metrics is injected.
"""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.step_time.ewma import Ewma
from scheduler.config import TierSet
from scheduler.registry.worker_status import TierStatus, WorkerStatus
from scheduler.tasks.task import ClaimedTask, EndedTask, tier_of
from scheduler.worker.heartbeat import EndedRates, WorkerIdentity

SECONDS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0, 3600.0)
EFFICIENCY_WEIGHT = 0.05  # weight of the newest call in the average batch efficiency: about the last 20 calls
CALL_OUTCOMES = ("ok", "failed", "busy", "unreachable")


class TaskMetrics:
    def __init__(self, registry: CollectorRegistry, tiers: TierSet) -> None:
        self._efficiency_average: Ewma | None = None

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tidegate_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tidegate_{name}", text, labels, registry=registry)

        self._calls = counter("endpoint_calls", "Calls of the static endpoint.", "outcome")
        self._call_seconds = Histogram(
            "tidegate_endpoint_call_seconds",
            "Seconds of a call of the static endpoint.",
            buckets=SECONDS,
            registry=registry,
        )
        self._slots = counter("batch_slots", "Places in batches that were filled with tasks.", "tier")
        self._padding = counter("batch_padding_slots", "Places in batches that were filled with padding.")
        self._efficiency = gauge("batch_efficiency_ratio", "Share of a batch that is tasks, average of recent calls.")
        self._wait = gauge("batch_wait_seconds", "How long a batch that is not full waits for more tasks.")
        self._waiting = gauge("tasks_waiting", "Tasks that wait, those for another try included.", "tier")
        self._seconds = Histogram(
            "tidegate_task_seconds",
            "Seconds from a task's arrival to its end.",
            ["tier"],
            buckets=SECONDS,
            registry=registry,
        )
        self._ended = counter("tasks_ended", "Tasks that have ended.", "tier", "state")
        self._retried = counter("task_retries", "Tries that failed and were not the last.", "tier")
        self.reconfigure(tiers)

    def reconfigure(self, tiers: TierSet) -> None:
        """Create every series before its first event, so that rates start at zero."""
        for outcome in CALL_OUTCOMES:
            self._calls.labels(outcome)
        for tier in tiers.tiers:
            for family in (self._slots, self._waiting, self._seconds, self._retried):
                family.labels(tier)
            for state in ("done", "dead"):
                self._ended.labels(tier, state)

    def record_waiting(self, counts: Mapping[str, int], wait_s: float) -> None:
        """Record how many tasks wait in each lane."""
        sums = dict.fromkeys((tier_of(lane) for lane in counts), 0)
        for lane, count in counts.items():
            sums[tier_of(lane)] += count
        for tier, count in sums.items():
            self._waiting.labels(tier).set(count)
        self._wait.set(wait_s)

    def record_call(self, claimed: Sequence[ClaimedTask], batch: int, took_s: float, outcome: str) -> None:
        self._calls.labels(outcome).inc()
        if outcome == "unreachable":
            return
        self._call_seconds.observe(took_s)
        for c in claimed:
            self._slots.labels(c.task.tier).inc()
        self._padding.inc(batch - len(claimed))
        share = len(claimed) / batch
        if self._efficiency_average is None:
            self._efficiency_average = Ewma(EFFICIENCY_WEIGHT, share)
        self._efficiency.set(self._efficiency_average.add(share))

    def record_ended(self, ended: EndedTask, seconds: float) -> None:
        self._ended.labels(ended.task.tier, ended.state.value).inc()
        self._seconds.labels(ended.task.tier).observe(seconds)

    def record_retried(self, tier: str) -> None:
        self._retried.labels(tier).inc()


class TaskReport:
    """What a worker without model and controller says of itself. Implements `scheduler.worker.heartbeat.SelfReport`.

    `batch` is the number of places in a call.
    """

    def __init__(self, identity: WorkerIdentity, endpoint: str, batch: int) -> None:
        self._identity = identity
        self._endpoint = endpoint
        self._batch = batch
        self._rates = EndedRates()

    def count_ended(self, tier: str) -> None:
        self._rates.count(tier)

    def read(self, now: float, wall_ms: int, interval_s: float) -> tuple[WorkerStatus, str]:
        rates = self._rates.update((), interval_s)
        status = WorkerStatus(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            page=self._identity.page,
            model_names=(),
            max_model_len=0,
            vocab_size=0,
            started_ms=self._identity.started_ms,
            device=self._endpoint,
            tiers={tier: TierStatus(batch_size=self._batch, finished_per_s=rate) for tier, rate in rates.items()},
            at_ms=wall_ms,
            batch_items=self._batch,
        )
        return status, "{}"
