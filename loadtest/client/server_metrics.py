"""A server's metrics, read once a second while an arm runs, and what is computed from the readings.

Only the wanted lines are kept during the run and parsed afterwards, since client and server share the CPU. Knows
Prometheus' text format; not what a metric means.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loadtest.client.http import Target, TargetError, get

WANTED = (
    "tidegate_step_seconds",
    "tidegate_num_requests_",
    "tidegate_controller_",
    "tidegate_num_preemptions",
    "tidegate_shed_seconds",
    "tidegate_engine_seconds",
    "tidegate_recomputed_tokens",
    "tidegate_reaction_steps",
    "tidegate_steps_shed",
    "tidegate_step_time_error",
    "tidegate_kv_cache_usage_ratio",
    "tidegate_generation_tokens",
    "tidegate_prefix_cache",
    "tidegate_slo_",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
STEP_SECONDS = "tidegate_step_seconds_sum"  # engine time

Series = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Reading:
    """The wanted lines of one scrape, and the time of its answer."""

    at_s: float
    lines: tuple[str, ...]

    def samples(self, name: str, **labels: str) -> list[Sample]:
        text = "\n".join(line for line in self.lines if line.startswith(name))
        found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return [s for s in found if s.name == name and labels.items() <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum over all series with these labels; None where there is none."""
        values = [s.value for s in self.samples(name, **labels)]
        return sum(values) if values else None


@dataclass(slots=True)
class Timeline:
    """The readings of one arm's round, in order."""

    readings: list[Reading] = field(default_factory=list)

    def within(self, start_s: float, end_s: float) -> "Timeline":
        """Return the readings from the last one before `start_s` to the first one after `end_s`."""
        before = [r for r in self.readings if r.at_s <= start_s][-1:]
        after = [r for r in self.readings if r.at_s >= end_s][:1]
        return Timeline([*before, *(r for r in self.readings if start_s < r.at_s < end_s), *after])

    def delta(self, name: str, **labels: str) -> float | None:
        """Return the growth of a counter over the readings."""
        if len(self.readings) < 2:
            return None
        last = self.readings[-1].total(name, **labels)
        return None if last is None else last - (self.readings[0].total(name, **labels) or 0.0)

    @property
    def span_s(self) -> float:
        return self.readings[-1].at_s - self.readings[0].at_s if self.readings else 0.0

    def gauge(self, name: str, **labels: str) -> Series:
        values = [(r.at_s, r.total(name, **labels)) for r in self.readings]
        return [(at_s, value) for at_s, value in values if value is not None]

    def rate(self, name: str, **labels: str) -> Series:
        """Return the growth of a counter per second between readings, at the later of the two."""
        counted = self.gauge(name, **labels)
        return [
            (now_s, (now - before) / (now_s - before_s))
            for (before_s, before), (now_s, now) in zip(counted, counted[1:], strict=False)
            if now_s > before_s
        ]

    def labels(self, name: str, label: str) -> list[str]:
        """Return all values of a label, in order of appearance."""
        return list(dict.fromkeys(s.labels.get(label, "") for r in self.readings for s in r.samples(name)))

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's counts over the readings by upper bound, cumulated as Prometheus has them."""
        if len(self.readings) < 2:
            return {}
        counts: dict[float, float] = {}
        for sign, reading in ((-1.0, self.readings[0]), (1.0, self.readings[-1])):
            for sample in reading.samples(f"{name}_bucket", **labels):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sign * sample.value
        return dict(sorted(counts.items()))


def bucket_quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Return a quantile as Prometheus' histogram_quantile: linear within a bucket, the last finite bound beyond it."""
    total = max(buckets.values(), default=0.0)
    if not total:
        return None
    below_bound, below = 0.0, 0.0
    for bound, count in buckets.items():
        if count >= q * total:
            if bound == float("inf") or count == below:
                return below_bound
            return below_bound + (bound - below_bound) * (q * total - below) / (count - below)
        below_bound, below = bound, count
    return below_bound


async def read_metrics(target: Target) -> Reading:
    """Read the wanted lines. Raises `TargetError`."""
    text = (await get(target, "/metrics")).decode(errors="replace")
    return Reading(perf_counter(), tuple(line for line in text.splitlines() if line.startswith(WANTED)))


async def engine_busy_s(target: Target) -> float | None:
    """Return engine seconds since the server's start, over all workers; None where the server does not export them."""
    try:
        return (await read_metrics(target)).total(STEP_SECONDS)
    except TargetError:
        return None


async def watch(target: Target, timeline: Timeline, every_s: float = 1.0) -> None:
    """Append a reading every `every_s` until cancelled. A server without metrics leaves the timeline empty."""
    next_s = perf_counter()
    while True:
        try:
            timeline.readings.append(await read_metrics(target))
        except TargetError:
            if not timeline.readings:
                return
        next_s = max(next_s + every_s, perf_counter())
        await asyncio.sleep(next_s - perf_counter())
