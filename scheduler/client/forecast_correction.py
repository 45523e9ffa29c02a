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


class ForecastCorrection:
    def __init__(self) -> None:
        self._factors = defaultdict[str, float](lambda: 1.0)
        self._expected: dict[str, _Expectation] = {}

    def factor(self, tier: str) -> float:
        return self._factors[tier]

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
        # It settles where both moves cancel: one wait exceeds the prediction for every 1 ÷ `odds` that do not.
        factor, odds = self._factors[expected.tier], expected.exceeded_share / (1 - expected.exceeded_share)
        is_late = now - expected.entered_s > expected.own_s + factor * expected.wait_s
        factor *= 1 + (STEP_UP if is_late else -STEP_UP * odds)
        self._factors[expected.tier] = min(MAX_FACTOR, max(1 / MAX_FACTOR, factor))

    def forget(self, request_id: str) -> None:
        """Drop the prediction for a request that ended without a first token."""
        self._expected.pop(request_id, None)
