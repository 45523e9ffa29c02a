"""What records the traces of batches and of their lines. The composition root has one for OpenTelemetry."""

from contextlib import AbstractContextManager
from typing import Protocol

from gateway.http.trace import RequestTrace
from gateway.jobs.batches.input.lines import BatchLine
from gateway.jobs.batches.model import Batch


class BatchTracer(Protocol):
    def line(self, batch: Batch, line: BatchLine) -> AbstractContextManager[RequestTrace]:
        """Return the trace of a line, which runs within the block. `batch` has a `traceparent`."""
        ...

    def end(self, batch: Batch) -> None:
        """Record the span of a batch that is over. A repeated call records the same span again."""
        ...
