"""The metrics of a worker in the simulator: they are written into the observation of the run, not to Prometheus.

Nothing scrapes a simulated worker, and rendering its metrics once a second would cost more than the scheduling.
"""

from array import array
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry

from loadtest.simulation.observation import MovedKnob, Observation
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.control.knobs import Decision
from scheduler.holdings.report import Report
from scheduler.holdings.status import CoreStatus
from scheduler.worker.metrics import SchedulerMetrics


class WatchedMetrics(SchedulerMetrics):
    """The metrics of one simulated worker.

    `begins_s` is the time on the clock at which the load begins.
    """

    def __init__(self, tiers: TierSet, observation: Observation, worker: int, clock: Clock, begins_s: float) -> None:
        super().__init__(CollectorRegistry(), tiers)
        self._observation = observation
        self._worker = worker
        self._clock = clock
        self._begins_s = begins_s

    def record_step(self, elapsed_s: float, ran: Mapping[str, int]) -> None:
        pass

    def record_report(self, report: Report) -> None:
        for sample in report.samples:
            if sample.kind == "queue":
                self._observation.queue_s.setdefault(sample.tier, array("d")).append(sample.seconds)

    def record_cancelled(self, tier: str) -> None:
        pass

    def record_decisions(self, decisions: Iterable[Decision]) -> None:
        at_s = self._clock.now() - self._begins_s
        self._observation.moves += [MovedKnob(at_s, self._worker, d) for d in decisions]

    def record_state(self, status: CoreStatus, queued: Mapping[str, int]) -> None:
        pass

    def text(self) -> str:
        return ""
