"""Mid-step eviction: whether to evict bulk sequences from the step in flight when an interactive request arrives.

An eviction saves the newcomer the rest of the step, or the rest of its bulk part. It throws away the work that the step
has already done for the evicted sequences. A second of interactive waiting counts for more than a second of bulk work.
A token bucket limits the bulk work that is thrown away in total. Bulk's own running time refills the bucket.

Decisions are made from numbers that are passed in; there is no clock and no I/O.
"""

from dataclasses import dataclass

INTERACTIVE_WEIGHT = 3.0  # seconds of bulk work that may be thrown away to save the newcomer one second of waiting
MIN_SAVED_S = 0.002  # s; a smaller saving is not worth an eviction
BUCKET_S = 0.5  # size of the token bucket, in seconds of bulk work


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The start time and the predicted lengths of a step, in seconds."""

    started_s: float
    step_s: float  # predicted length of the whole step
    kept_s: float  # predicted length of a step with only the sequences that cannot be evicted; 0 if there are none

    def progress(self, now: float) -> float:
        """Return the share of the step that is done at `now`, in [0, 1], if the predicted length is right."""
        return min(1.0, max(0.0, (now - self.started_s) / self.step_s)) if self.step_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class EvictionTradeoff:
    """The gain and the loss of an eviction: seconds saved for the newcomer, and seconds of bulk work thrown away."""

    saved_s: float
    wasted_s: float

    @property
    def pays(self) -> bool:
        return self.saved_s >= MIN_SAVED_S and INTERACTIVE_WEIGHT * self.saved_s > self.wasted_s


def weigh_eviction(timing: StepTiming, now: float, num_layers: int) -> EvictionTradeoff:
    """Weigh an eviction at the next layer boundary of a step, in a model of `num_layers` layers."""
    progress = timing.progress(now)
    bulk_s = max(0.0, timing.step_s - timing.kept_s)
    saved_s = (1 - progress) * bulk_s - timing.step_s / num_layers
    return EvictionTradeoff(max(0.0, saved_s), progress * bulk_s)
