"""Distributes reports: events to the publisher, latencies to the metrics, ended requests to heartbeat and tracer."""

from scheduler.clock import Clock
from scheduler.holdings.report import Report
from scheduler.worker.heartbeat import Heartbeat
from scheduler.worker.metrics import SchedulerMetrics
from scheduler.worker.publisher import Publisher
from scheduler.worker.tracing import RequestTracer


class Reporter:
    def __init__(
        self,
        publisher: Publisher,
        metrics: SchedulerMetrics,
        heartbeat: Heartbeat,
        clock: Clock,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._publisher = publisher
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._clock = clock
        self._tracer = tracer

    def send(self, report: Report) -> None:
        for end in report.ended:
            self._heartbeat.count_ended(end)
        self._publisher.send(report)
        self._metrics.record_report(report)
        if report.traced and self._tracer is not None:
            for state in report.traced:
                self._tracer.record(state, self._clock.now())
