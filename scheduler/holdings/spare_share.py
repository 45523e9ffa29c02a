"""The share of the engine that interactive tiers leave to urgent bulk, over the last hour.

Windows of batches are promised by it. Interactive load comes in bursts, so a mean over seconds says little, and a long
mean hides a busy time that a short window may meet. So for each length of time there is the busiest such stretch.
Knows seconds of engine time only.
"""

from collections import deque
from collections.abc import Iterator
from itertools import accumulate

from scheduler.registry.worker_status import LEFT_STRETCHES_S

INTERVAL_S = 10.0  # seconds that are summed up before they count
MAX_INTERVALS = int(LEFT_STRETCHES_S[-1] / INTERVAL_S)


class SpareShare:
    """Measures at each heartbeat. `shares` has one share for each of `LEFT_STRETCHES_S`; it is empty at first."""

    def __init__(self) -> None:
        self.shares: tuple[float, ...] = ()
        self._taken: deque[float] = deque(maxlen=MAX_INTERVALS)  # share of interactive tiers, by interval
        self._total_s = 0.0  # engine time of interactive tiers at the begin of the present interval
        self._elapsed_s = 0.0  # length of the present interval

    def add(self, interactive_s: float, interval_s: float) -> None:
        """Note the engine time of interactive tiers since the start, `interval_s` seconds after the last call."""
        self._elapsed_s += interval_s
        if self._elapsed_s < INTERVAL_S:
            return
        self._taken.append(min(1.0, (interactive_s - self._total_s) / self._elapsed_s))
        self._total_s, self._elapsed_s = interactive_s, 0.0
        left = (1 - max(self._means(int(stretch_s / INTERVAL_S))) for stretch_s in LEFT_STRETCHES_S)
        self.shares = tuple(accumulate(left, max))  # a longer stretch consists of shorter ones, except for its end

    def _means(self, length: int) -> Iterator[float]:
        """Yield the mean share of each stretch of `length` intervals, or of all if there are fewer."""
        length = min(length, len(self._taken))
        sums = list(accumulate(self._taken, initial=0.0))
        for end in range(length, len(sums)):
            yield (sums[end] - sums[end - length]) / length
