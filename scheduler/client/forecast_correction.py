"""The correction of predicted waits by a learned factor, so that few requests wait longer than predicted.

The factor is learned from earlier predictions. It accounts for effects that a prediction cannot know: how workers share
the work, and what else a step holds. It follows a quantile of measured ÷ predicted wait per tier, and rises faster than
it falls. While no first token arrives, the factor does not change.
"""

from collections import defaultdict
from dataclasses import dataclass

from scheduler.quantile_tracker import QuantileTracker

EXCEEDED_SHARE = 0.02  # share of the waits that may be longer than predicted
STEP_UP = 0.06  # relative rise of the factor after a wait that was longer than predicted
MIN_FACTOR, MAX_FACTOR = 0.5, 4.0


@dataclass(frozen=True, slots=True)
class _Expectation:
    tier: str
    entered_s: float
    own_s: float
    wait_s: float  # predicted wait behind other requests, without the factor


def _new_factor() -> QuantileTracker:
    return QuantileTracker(1.0, STEP_UP, MIN_FACTOR, MAX_FACTOR, relative=True)


class ForecastCorrection:
    def __init__(self) -> None:
        self._factors = defaultdict[str, QuantileTracker](_new_factor)
        self._expected: dict[str, _Expectation] = {}

    def factor(self, tier: str) -> float:
        return self._factors[tier].value

    def expect(self, request_id: str, tier: str, now: float, own_s: float, wait_s: float) -> None:
        """Remember the prediction that the first token comes within `own_s` + factor · `wait_s` seconds."""
        self._expected[request_id] = _Expectation(tier, now, own_s, wait_s)

    def first_token(self, request_id: str, now: float) -> None:
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        factor = self._factors[expected.tier]
        if now - expected.entered_s > expected.own_s + factor.value * expected.wait_s:
            factor.up()
        else:
            factor.down(EXCEEDED_SHARE / (1 - EXCEEDED_SHARE))

    def forget(self, request_id: str) -> None:
        """Drop the prediction for a request that ended without a first token."""
        self._expected.pop(request_id, None)
