"""The correction of predicted waits by a learned factor: measured ÷ predicted wait, one factor per tier.

The factor accounts for effects that a prediction cannot know: how workers share the work, and what else a step holds.
It follows a quantile of the ratio. A limit that is an SLO needs a high quantile, so that few admitted requests are
late. A limit that is a patience needs the median, so that predictions are right on average. While no first token
arrives, the factor does not change.
"""

from collections import defaultdict
from dataclasses import dataclass

# Shares of the waits that may be longer than predicted.
SLO_EXCEEDED_SHARE = 0.01
MEDIAN_EXCEEDED_SHARE = 0.5
STEP_UP = 0.06  # relative rise of the factor after a wait that was longer than predicted
MAX_FACTOR = 4.0  # upper limit of the factor; the lower limit is 1 ÷ MAX_FACTOR


@dataclass(frozen=True, slots=True)
class _Expectation:
    tier: str
    entered_s: float
    own_s: float
    wait_s: float  # predicted wait behind other requests, without the factor
    exceeded_share: float


class QuantileTracker:
    """An estimate (`value`) that follows a quantile of samples and stays inside [low, high]. It stores no samples.

    A sample above the estimate raises it by the share `step_up` of itself. Any other lowers it by `odds` times as much.
    It settles when both movements cancel: one sample exceeds it for every 1 ÷ `odds` that do not.
    """

    __slots__ = ("_high", "_low", "_step_up", "value")

    def __init__(self, value: float, step_up: float, low: float, high: float) -> None:
        self.value = value
        self._step_up = step_up
        self._low = low
        self._high = high

    def up(self) -> None:
        """Raise the value, because a sample exceeded it."""
        self._move(self._step_up)

    def down(self, odds: float) -> None:
        """Lower the value, because a sample did not exceed it."""
        self._move(-self._step_up * odds)

    def _move(self, step: float) -> None:
        self.value = min(self._high, max(self._low, self.value * (1 + step)))


def _new_factor() -> QuantileTracker:
    return QuantileTracker(1.0, STEP_UP, 1 / MAX_FACTOR, MAX_FACTOR)


class ForecastCorrection:
    def __init__(self) -> None:
        self._factors = defaultdict[str, QuantileTracker](_new_factor)
        self._expected: dict[str, _Expectation] = {}

    def factor(self, tier: str) -> float:
        return self._factors[tier].value

    def expect(
        self, request_id: str, tier: str, now: float, own_s: float, wait_s: float, exceeded_share: float
    ) -> None:
        """Remember the prediction that the first token comes within `own_s` + factor · `wait_s` seconds.

        The factor settles where a share `exceeded_share` of the first tokens comes later than predicted.
        """
        self._expected[request_id] = _Expectation(tier, now, own_s, wait_s, exceeded_share)

    def first_token(self, request_id: str, now: float) -> None:
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        factor = self._factors[expected.tier]
        if now - expected.entered_s > expected.own_s + factor.value * expected.wait_s:
            factor.up()
        else:
            factor.down(expected.exceeded_share / (1 - expected.exceeded_share))

    def forget(self, request_id: str) -> None:
        """Drop the prediction for a request that ended without a first token."""
        self._expected.pop(request_id, None)
