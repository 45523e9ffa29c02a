"""Read the metrics of a server once a second while an arm runs, and compute values from the readings.

During the run, only the wanted lines are kept. They are parsed afterwards, because client and server share the CPU.
Knows Prometheus' text format; does not know what a metric means.
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
STEP_SECONDS = "tidegate_step_seconds_sum"  # counter of engine seconds

Series = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Reading:
    """The wanted lines of one scrape, and the time at which the server's answer arrived."""

    at_s: float
    lines: tuple[str, ...]

    def samples(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples of the series `name` that have all of these labels."""
        text = "\n".join(line for line in self.lines if line.startswith(name))
        found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return [s for s in found if s.name == name and labels.items() <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum over all series with these labels; None if there is no such series."""
        values = [s.value for s in self.samples(name, **labels)]
        return sum(values) if values else None


@dataclass(slots=True)
class Timeline:
    """The readings of one round of an arm, in order of time."""

    readings: list[Reading] = field(default_factory=list)

    def within(self, start_s: float, end_s: float) -> "Timeline":
        """Return the readings between `start_s` and `end_s`, with one more reading on each side if there is one.

        These two are the last reading at or before `start_s` and the first reading at or after `end_s`.
        """
        before = [r for r in self.readings if r.at_s <= start_s][-1:]
        after = [r for r in self.readings if r.at_s >= end_s][:1]
        return Timeline([*before, *(r for r in self.readings if start_s < r.at_s < end_s), *after])

    def delta(self, name: str, **labels: str) -> float | None:
        """Return the growth of a counter from the first to the last reading.

        Return None if there are fewer than two readings, or if the last one does not contain the counter.
        """
        if len(self.readings) < 2:
            return None
        last = self.readings[-1].total(name, **labels)
        return None if last is None else last - (self.readings[0].total(name, **labels) or 0.0)

    @property
    def span_s(self) -> float:
        return self.readings[-1].at_s - self.readings[0].at_s if self.readings else 0.0

    def gauge(self, name: str, **labels: str) -> Series:
        """Return (time, value) for each reading that contains the metric."""
        values = [(r.at_s, r.total(name, **labels)) for r in self.readings]
        return [(at_s, value) for at_s, value in values if value is not None]

    def labels(self, name: str, label: str) -> list[str]:
        """Return all values of the label `label`, in order of their first appearance."""
        return list(dict.fromkeys(s.labels.get(label, "") for r in self.readings for s in r.samples(name)))

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the growth of a histogram's buckets from the first to the last reading.

        The result maps the upper bound of a bucket to its cumulative count, as in Prometheus.
        """
        if len(self.readings) < 2:
            return {}
        counts: dict[float, float] = {}
        for sign, reading in ((-1.0, self.readings[0]), (1.0, self.readings[-1])):
            for sample in reading.samples(f"{name}_bucket", **labels):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sign * sample.value
        return dict(sorted(counts.items()))


def bucket_quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Return a quantile in the same way as Prometheus' histogram_quantile.

    The value is interpolated linearly within a bucket. If the quantile is in the bucket without a finite upper bound,
    the value is the last finite bound. Return None if the histogram is empty.
    """
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
    """Read the wanted lines from the server. Raises `TargetError`."""
    text = (await get(target, "/metrics")).decode(errors="replace")
    return Reading(perf_counter(), tuple(line for line in text.splitlines() if line.startswith(WANTED)))


async def engine_busy_s(target: Target) -> float | None:
    """Return the seconds that engines have spent in steps since the server's start, summed over all workers.

    Return None if the server does not export these seconds.
    """
    try:
        return (await read_metrics(target)).total(STEP_SECONDS)
    except TargetError:
        return None


async def watch(target: Target, timeline: Timeline, every_s: float = 1.0) -> None:
    """Append a reading to `timeline` every `every_s` seconds until the task is cancelled.

    If the server has no metrics, return with an empty timeline.
    """
    next_s = perf_counter()
    while True:
        try:
            timeline.readings.append(await read_metrics(target))
        except TargetError:
            if not timeline.readings:
                return
        next_s = max(next_s + every_s, perf_counter())
        await asyncio.sleep(next_s - perf_counter())
