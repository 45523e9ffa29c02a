"""Sliding-window quantiles and arrival rates: what the controller sees of the past. Time is passed in."""

from collections import deque

import numpy as np

WINDOW_S = 30.0
MAX_SAMPLES = 4096
MIN_SAMPLES = 20  # with fewer, a p99 says nothing


class LatencyWindow:
    """The latencies of the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, now: float, seconds: float) -> None:
        self._samples.append((now, seconds))

    def p99(self, now: float, since_s: float = float("-inf")) -> float | None:
        """Seconds, of what came since `since_s`; None without enough data."""
        values = self._values(now, since_s)
        return float(np.quantile(values, 0.99)) if len(values) >= MIN_SAMPLES else None

    def miss_share(self, now: float, target_s: float, since_s: float) -> float | None:
        """Share of latencies above `target_s` since `since_s`; None without enough data."""
        values = self._values(now, since_s)
        return sum(v > target_s for v in values) / len(values) if len(values) >= MIN_SAMPLES else None

    def _values(self, now: float, since_s: float) -> list[float]:
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        return [seconds for at_s, seconds in self._samples if at_s >= since_s]


class ArrivalRate:
    """Exponentially weighted arrivals per second, with a time constant of `tau_s`."""

    def __init__(self, tau_s: float = 5.0) -> None:
        self._tau_s = tau_s
        self._per_s = 0.0
        self._count = 0
        self._since_s: float | None = None

    def add(self, count: int) -> None:
        self._count += count

    def update(self, now: float) -> float:
        """Close the interval since the last update; the smoothed rate."""
        if self._since_s is not None and now > self._since_s:
            interval_s = now - self._since_s
            weight = 1 - np.exp(-interval_s / self._tau_s)
            self._per_s += float(weight) * (self._count / interval_s - self._per_s)
        self._since_s, self._count = now, 0
        return self._per_s
