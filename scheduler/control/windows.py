"""Sliding windows of latencies and misses, and a smoothed arrival rate. The time is always passed in.

The windows keep counts in half-second slices and store no single samples. Their memory is therefore bounded at any rate
of tokens, and the window always covers the whole 30 seconds.
"""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from engine.step_time.ewma import Ewma
from engine.step_time.kind import SHORTEST_S
from scheduler.clock import NEVER_S

WINDOW_S = 30.0  # length of the window, in seconds
UPDATE_S = 0.5  # seconds between two rounds of feedback; samples that come within so many are counted together
MIN_SAMPLES = 20  # with fewer samples, a p99 or a share of misses has no meaning
BUCKET_WIDTH = 0.01  # width of a histogram bucket in log(seconds), so that a quantile is exact to half a percent


@dataclass(slots=True)
class _Slice:
    """The counts of the samples between `first_s` and `last_s`, which are less than `UPDATE_S` apart."""

    first_s: float
    last_s: float
    count: int = 0
    missed: int = 0
    # Number of samples, by round(log(seconds) / BUCKET_WIDTH).
    buckets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


class SlidingWindow:
    """The samples of the last `WINDOW_S` seconds: how many of them missed a target, and how long they were.

    A slice starts when its first sample comes.
    """

    def __init__(self) -> None:
        self._slices: deque[_Slice] = deque()

    def add(self, now: float, is_miss: bool, seconds: float | None = None) -> None:
        """Count one more sample; `seconds` is its length if it has one."""
        if not self._slices or now - self._slices[-1].first_s >= UPDATE_S:
            self._expire(now)
            self._slices.append(_Slice(now, now))
        newest = self._slices[-1]
        newest.last_s = now
        newest.count += 1
        newest.missed += is_miss
        if seconds is not None:
            newest.buckets[round(math.log(max(seconds, SHORTEST_S)) / BUCKET_WIDTH)] += 1

    def p99(self, now: float, since_s: float = -NEVER_S) -> float | None:
        """Return the p99 in seconds of the lengths since `since_s`; None with fewer than `MIN_SAMPLES` samples."""
        buckets: defaultdict[int, int] = defaultdict(int)
        for counted in self._since(now, since_s):
            for bucket, count in counted.buckets.items():
                buckets[bucket] += count
        total = sum(buckets.values())
        if total < MIN_SAMPLES:
            return None
        above = 0
        for bucket in sorted(buckets, reverse=True):
            above += buckets[bucket]
            if above > 0.01 * total:
                break
        return math.exp(bucket * BUCKET_WIDTH)

    def miss_share(self, now: float, since_s: float = -NEVER_S, min_samples: int = MIN_SAMPLES) -> float | None:
        """Return the share of misses among the samples since `since_s`; None if there are fewer than `min_samples`."""
        slices = self._since(now, since_s)
        total = sum(s.count for s in slices)
        return sum(s.missed for s in slices) / total if total >= min_samples else None

    def _since(self, now: float, since_s: float) -> list[_Slice]:
        self._expire(now)
        return [s for s in self._slices if s.first_s >= since_s]

    def _expire(self, now: float) -> None:
        while self._slices and self._slices[0].last_s < now - WINDOW_S:
            self._slices.popleft()


class ArrivalRate:
    """The number of arrivals per second, smoothed exponentially with a time constant of `tau_s` seconds."""

    def __init__(self, tau_s: float = 5.0) -> None:
        self._tau_s = tau_s
        self._per_s = Ewma(1.0)
        self._count = 0
        self._since_s: float | None = None

    def add(self, count: int) -> None:
        self._count += count

    def update(self, now: float) -> float:
        """End the interval since the last update, and return the smoothed rate in arrivals per second."""
        if self._since_s is not None and now > self._since_s:
            interval_s = now - self._since_s
            self._per_s.add(self._count / interval_s, weight=1 - math.exp(-interval_s / self._tau_s))
        self._since_s, self._count = now, 0
        return self._per_s.value
