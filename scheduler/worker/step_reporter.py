"""Reports the results of a step to the rest of the worker.

Events go to the publisher, latencies to the metrics, ended requests to the heartbeat, and an entry to the step log.
"""

from engine.interface import StepResult
from engine.step_time.cost import StepWork
from scheduler.clock import Clock
from scheduler.planning.step_report import StepReport
from scheduler.worker.heartbeat import Heartbeat
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.publisher import Publisher
from scheduler.worker.step_log import StepEntry, StepLog
from scheduler.worker.tracing import RequestTracer


class StepReporter:
    def __init__(
        self,
        publisher: Publisher,
        metrics: SchedulerMetrics,
        heartbeat: Heartbeat,
        step_log: StepLog,
        clock: Clock,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._publisher = publisher
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._step_log = step_log
        self._clock = clock
        self._tracer = tracer

    def report_step(self, result: StepResult, report: StepReport, now: float) -> None:
        if report.sequences:
            self._metrics.record_step(result.elapsed_s, report.sequences)
            self._log(result, report, now)
        self.report_requests(report)

    def report_requests(self, report: StepReport) -> None:
        for end in report.ended:
            self._heartbeat.count_ended(end)
        self._publisher.send(report)
        self._metrics.record_report(report)
        if report.traced and self._tracer is not None:
            for state in report.traced:
                self._tracer.record(state, self._clock.now())

    def _log(self, result: StepResult, report: StepReport, now: float) -> None:
        """Write a log entry if the step's time says something about its work, or if sequences were evicted from it."""
        if report.work is not None or result.evicted:
            work, num_evicted = report.work or StepWork(), len(result.evicted)
            predicted_s, sequences = report.predicted_s, report.sequences
            self._step_log.record(StepEntry.of(work, result.elapsed_s, now, predicted_s, num_evicted, sequences))
