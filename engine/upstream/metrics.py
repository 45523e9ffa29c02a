"""Reads a server's load from its metrics, in Prometheus' text format. Any text can be read: what is odd is unknown."""

from engine.streaming import UpstreamLoad
from engine.upstream.dialects import Metrics

LARGEST = 1e9  # no server has more requests


def load_of(metrics: Metrics, text: str) -> UpstreamLoad:
    running, waiting, kv_usage = (_sum_of(name, text) for name in (metrics.running, metrics.waiting, metrics.kv_usage))
    return UpstreamLoad(_whole(running), _whole(waiting), kv_usage)


def _sum_of(name: str, text: str) -> float | None:
    """Return the sum of a metric over its labels; None if the server does not have it, or if it cannot be true."""
    from prometheus_client.parser import text_string_to_metric_families  # only this function needs it

    lines = [line for line in text.splitlines() if line.startswith(name)]
    try:
        samples = [s for family in text_string_to_metric_families("\n".join(lines) + "\n") for s in family.samples]
    except Exception:  # the parser raises errors of several classes
        return None
    values = [sample.value for sample in samples if sample.name == name]
    total = sum(values)
    return total if values and 0 <= total <= LARGEST else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
