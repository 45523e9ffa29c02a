"""Whether to evict bulk sequences from the step in flight, for an interactive request that has just arrived.

Pure. Eviction saves the newcomer the rest of the step, or of its bulk part, and throws away what the step has already
computed for the evicted sequences. A second of interactive waiting counts for more than a second of bulk work. A token
bucket bounds how much bulk may lose in all: bulk's own running time refills it.
"""

from dataclasses import dataclass

INTERACTIVE_WEIGHT = 3.0  # seconds of bulk work that may be thrown away for each second that the newcomer is spared
MIN_SAVED_S = 0.002  # s; a smaller saving is not worth an eviction
BOUNDARY_SHARE = 1 / 30  # of a step: the time to its next layer boundary, where sequences can be evicted
WASTE_SHARE = 0.025  # of bulk's running time that may be thrown away in the long run
BUCKET_MAX_S, BUCKET_START_S = 1.0, 0.1  # s of bulk work: the bucket's size, and its level at start


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When a step began, the predicted length of the whole step, and the predicted length of a step of the sequences
    that cannot be evicted (0: there are none). Seconds."""

    started_s: float
    step_s: float
    kept_s: float

    def progress(self, now: float) -> float:
        """Return the share of the step that is done, in [0, 1], by the prediction."""
        return min(1.0, max(0.0, (now - self.started_s) / self.step_s)) if self.step_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class EvictionTradeoff:
    """Seconds that an eviction now would save the newcomer, and seconds of bulk work that it would throw away."""

    saved_s: float
    wasted_s: float

    @property
    def pays(self) -> bool:
        return self.saved_s >= MIN_SAVED_S and INTERACTIVE_WEIGHT * self.saved_s > self.wasted_s


def weigh_eviction(timing: StepTiming, now: float) -> EvictionTradeoff:
    progress = timing.progress(now)
    bulk_s = max(0.0, timing.step_s - timing.kept_s)
    saved_s = (1 - progress) * bulk_s - BOUNDARY_SHARE * timing.step_s
    return EvictionTradeoff(max(0.0, saved_s), progress * bulk_s)


class TokenBucket:
    """Seconds of bulk work that may still be thrown away."""

    def __init__(self) -> None:
        self._level_s = BUCKET_START_S
        self.wasted_s = 0.0  # in all
        self.num_evictions = 0  # steps that sequences were evicted from

    def refill(self, bulk_s: float) -> None:
        """Add the share of `bulk_s`, seconds that bulk ran for."""
        self._level_s = min(BUCKET_MAX_S, self._level_s + WASTE_SHARE * bulk_s)

    def can_take(self, wasted_s: float) -> bool:
        return self._level_s >= wasted_s

    def take(self, wasted_s: float) -> None:
        """Account for one step that sequences were evicted from, and `wasted_s` of engine time thrown away with it."""
        self._level_s -= wasted_s
        self.num_evictions += 1
        self.wasted_s += wasted_s
