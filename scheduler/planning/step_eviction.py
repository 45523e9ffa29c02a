"""Shall bulk leave the step that runs, for an interactive request that has just come? A decision by cost.

Pure. Leaving saves the newcomer the rest of the step, or of its bulk part, and throws away what the step has done for
those who leave. Interactive time counts for more than bulk's; how much bulk may lose in all is bounded by a credit that
its own running time earns.
"""

from dataclasses import dataclass

WORTH = 3.0  # a second that an interactive request waits counts as much as so many of bulk's work
MIN_SAVED_S = 0.002  # less is not worth the trouble
BOUNDARY_SHARE = 1 / 30  # of a step: to its next layer boundary
WASTE_SHARE = 0.025  # of bulk's running time that may be thrown away
CREDIT_MAX_S, CREDIT_START_S = 1.0, 0.1  # seconds of it, saved up


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """Predicted seconds of the whole step and of what would stay in it (0: nothing), and when it began."""

    started_s: float
    step_s: float
    kept_s: float

    def progress(self, now: float) -> float:
        """In [0, 1], as far as the prediction goes."""
        return min(1.0, max(0.0, (now - self.started_s) / self.step_s)) if self.step_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """What leaving now would save the newcomer and cost bulk, in seconds."""

    saved_s: float
    thrown_s: float

    @property
    def pays(self) -> bool:
        return self.saved_s >= MIN_SAVED_S and WORTH * self.saved_s > self.thrown_s


def exchange(step: StepInFlight, now: float) -> Exchange:
    progress = step.progress(now)
    bulk_s = max(0.0, step.step_s - step.kept_s)
    saved_s = (1 - progress) * bulk_s - BOUNDARY_SHARE * step.step_s
    return Exchange(max(0.0, saved_s), progress * bulk_s)


class TokenBucket:
    """Seconds of bulk's work that may still be thrown away."""

    def __init__(self) -> None:
        self._credit_s = CREDIT_START_S
        self.wasted_s = 0.0
        self.num_evictions = 0

    def earn(self, bulk_s: float) -> None:
        """Bulk ran for `bulk_s`."""
        self._credit_s = min(CREDIT_MAX_S, self._credit_s + WASTE_SHARE * bulk_s)

    def can_spend(self, thrown_s: float) -> bool:
        return self._credit_s >= thrown_s

    def spend(self, thrown_s: float) -> None:
        """A step was left; `thrown_s` of it had gone into what was thrown away."""
        self._credit_s -= thrown_s
        self.num_evictions += 1
        self.wasted_s += thrown_s
