"""Decides whether a process sends traces, and opens what sends them. Imports OpenTelemetry only where it is wanted."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from tidegate.tracing.exporter import Tracing

log = structlog.get_logger()

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOL = "http/protobuf"
INSTALL = "pip install 'tidegate[otel]'"


class TracingError(Exception):
    """Traces were asked for and cannot be sent. The message is one sentence for the operator."""


@contextmanager
def traced(
    part: str, instance: str, is_asked: bool, environment: Mapping[str, str] = os.environ
) -> "Iterator[Tracing | None]":
    """Yield what records and sends the traces of `part`; None if no traces are wanted. Send the last ones at the end.

    Traces are wanted with `--otel`, or if the environment names a collector. Raises `TracingError` if they are asked
    for by `--otel` and cannot be sent. Without the flag, this is only a line in the log, because clusters set the
    environment for all programs.
    """
    tracing = None
    if is_asked or any(environment.get(name) for name in ENDPOINT_VARIABLES):
        try:
            tracing = _open(part, instance, environment)
        except TracingError as error:
            if is_asked:
                raise
            log.warning("no traces are sent", reason=str(error))
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def _open(part: str, instance: str, environment: Mapping[str, str]) -> "Tracing":
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", PROTOCOL):
        raise TracingError(f"Traces are sent by {PROTOCOL} only, and OTEL_EXPORTER_OTLP_PROTOCOL says {protocol}.")
    try:
        from tidegate.tracing.exporter import Tracing
    except ImportError:
        raise TracingError(f"Traces need OpenTelemetry: {INSTALL}") from None
    tracing = Tracing.to_collector(part, instance)
    log.info("traces are sent", by=PROTOCOL)
    return tracing
