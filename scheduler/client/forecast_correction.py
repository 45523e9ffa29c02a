"""How predicted waits turned out: the factor by which they must be multiplied for few to be exceeded.

Whatever a prediction cannot know (how workers share the work, what else a step holds) shows here. The factor follows
the quantile of measured ÷ predicted on events, faster up than down; without events it stays.
"""

from collections import defaultdict
from dataclasses import dataclass

EXCEEDED = 0.02  # of the waits may be longer than predicted
STEP = 0.06  # of the factor, for one that was
LEAST, MOST = 0.5, 4.0


@dataclass(frozen=True, slots=True)
class _Expectation:
    tier: str
    entered_s: float
    own_s: float
    wait_s: float  # behind others, as predicted without the factor


class ForecastCorrection:
    def __init__(self) -> None:
        self._factors: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self._expected: dict[str, _Expectation] = {}

    def factor(self, tier: str) -> float:
        return self._factors[tier]

    def expect(self, request_id: str, tier: str, now: float, own_s: float, wait_s: float) -> None:
        """A first token within `own_s`, and `wait_s` times the factor."""
        self._expected[request_id] = _Expectation(tier, now, own_s, wait_s)

    def first_token(self, request_id: str, now: float) -> None:
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        factor = self._factors[expected.tier]
        exceeded = now - expected.entered_s > expected.own_s + factor * expected.wait_s
        factor *= 1 + STEP if exceeded else 1 - STEP * EXCEEDED / (1 - EXCEEDED)
        self._factors[expected.tier] = min(MOST, max(LEAST, factor))

    def forget(self, request_id: str) -> None:
        """It ended without one."""
        self._expected.pop(request_id, None)
