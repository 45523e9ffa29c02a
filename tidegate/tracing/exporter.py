"""The OpenTelemetry side of traces: a tracer whose spans go to a collector. Only imported where traces are on."""

import logging
import os
import threading
from importlib.metadata import PackageNotFoundError, version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer
from starlette.types import ASGIApp

from tidegate.tracing.batch_spans import BatchSpans, SpanIds
from tidegate.tracing.http_spans import TracedRequests
from tidegate.tracing.task_spans import TaskSpans
from tidegate.tracing.worker_spans import WorkerSpans

FLUSH_S = 3.0  # seconds for the last spans to be sent when a process ends


class Tracing:
    """The traces of one process. Close it at the end, so that the last spans are sent."""

    def __init__(self, part: str, instance: str, processor: SpanProcessor) -> None:
        """`part` is gateway or worker; `instance` names this process. OTEL_SERVICE_NAME replaces the service's name."""
        service = os.environ.get("OTEL_SERVICE_NAME") or f"tidegate-{part}"
        named = {"service.name": service, "service.instance.id": instance, "service.version": _version()}
        self._ids = SpanIds()
        resource = Resource.create(named)
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("tidegate", _version())

    @classmethod
    def to_collector(cls, part: str, instance: str) -> "Tracing":
        """Return traces that go to where the OTEL_EXPORTER_OTLP_… variables say; by default to port 4318 here."""
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # else a line for each of its retries
        return cls(part, instance, BatchSpanProcessor(OTLPSpanExporter()))

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with a span around each request that generates something, now or later."""
        return TracedRequests(app, self._tracer)

    def batches(self) -> BatchSpans:
        """Return what records the spans of batches and their lines."""
        return BatchSpans(self._tracer, self._ids)

    def requests_of(self, worker_id: str) -> WorkerSpans:
        return WorkerSpans(self._tracer, worker_id)

    def tasks_of(self, worker_id: str, endpoint: str) -> TaskSpans:
        return TaskSpans(self._tracer, worker_id, endpoint)

    def close(self) -> None:
        """Send the last spans, for at most `FLUSH_S`: a collector that is away must not hold up the end."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


def _version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
