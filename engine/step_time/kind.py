"""The model of one kind of step (decode-only or mixed), learned online from measured steps.

A linear model of the work (`StepRegression`) gives the coefficients. No prediction is below the shortest step seen. A
safety factor raises the coefficients that a planner gets. Knows numbers only.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.ewma import Ewma
from engine.step_time.regression import SOLVE_EVERY, StepRegression, Vector

SHORTEST_S = 1e-6  # seconds; shorter predictions and measurements count as this
KNOWN_STEPS = 64  # steps of a kind after which a deviation is no longer taken for an error of the coefficients
SAFETY_QUANTILE = 0.95  # quantile of measured ÷ predicted: the safety factor covers this share of steps
SAFETY_WINDOW = 128  # number of newest steps from which the quantile is computed
# Weight of a new step in the usual measured ÷ predicted. It averages over more steps than the regression does.
USUAL_WEIGHT = 0.004
SAFETY_EVERY = 16  # steps between two updates of the safety factor
MAX_SAFETY = 2.0  # upper bound of the safety factor
# Each step near the minimum step time raises that minimum by this factor. So a minimum that is no longer reached rises
# slowly.
MIN_STEP_GROWTH = 1.002
NEAR_MIN_STEP = 1.2  # a step is near the minimum if its linear prediction is below this multiple of the minimum
# The minimum step time is at most this multiple of the linear prediction of one decode. The bound is needed if all
# steps seen were long: then none of them shows the minimum.
MAX_MIN_STEP = 2.0

# Factors that bring the features 1, P, A, C and D of `cost` to comparable sizes.
_SCALE = (1.0, 1e-2, 1e-5, 1e-4, 1e-2)


class StepKind:
    """The model of one kind of step.

    All times are without the engine's slowdown, except those of `cost`, which include it.
    """

    def __init__(self, theta: Vector) -> None:
        self._regression = StepRegression(theta)
        self._theta: tuple[float, ...] = tuple(theta.tolist())
        self._min_step_s = 0.0
        self._ratios: deque[float] = deque(maxlen=SAFETY_WINDOW)  # measured ÷ predicted
        self._num_tracked = 0
        self._num_of_size: Counter[int] = Counter()
        self.safety = 1.0  # the factor by which `cost` is above the mean
        self._usual_ratio = Ewma(USUAL_WEIGHT, 1.0)

    @property
    def is_known(self) -> bool:
        """Whether the steps learned so far say how long a step takes."""
        return self._num_tracked >= KNOWN_STEPS

    def knows(self, size: int) -> bool:
        """Whether the steps learned so far say how long one of this size takes.

        Otherwise its deviation is an error of the coefficients: if only single sequences were seen, nothing tells how
        much longer a step of several takes.
        """
        return self.is_known and self._num_of_size[size] >= SOLVE_EVERY

    @property
    def is_tracked(self) -> bool:
        return self._num_tracked > 0

    def cost(self, slowdown: float, min_step_s: float) -> StepCost:
        """Return the present coefficients, multiplied by the slowdown and by the safety factor."""
        k = [value * scale * slowdown * self.safety for value, scale in zip(self._theta, _SCALE, strict=True)]
        return StepCost(k[0], k[1], k[2], k[3], k[4], min_step_s * slowdown * self.safety, slowdown)

    def predict(self, x: Sequence[float]) -> float:
        """Return the expected seconds of a step with features `x`."""
        return max(self._linear_s(x), self.min_step_s, SHORTEST_S)

    @property
    def min_step_s(self) -> float:
        """The minimum step time in seconds.

        It is the shortest step seen, but at most `MAX_MIN_STEP` times the linear prediction of one decode, unless noise
        has made that 0.
        """
        one_decode_s = self._theta[0] + self._theta[4] * _SCALE[4]
        return min(self._min_step_s, MAX_MIN_STEP * one_decode_s) if one_decode_s > SHORTEST_S else self._min_step_s

    def track(self, x: Sequence[float], size: int, seconds: float) -> None:
        """Record the error of the linear prediction for a step. Call this before the step is learned."""
        linear_s = max(self._linear_s(x), SHORTEST_S)
        self._track_min_step(seconds, linear_s)
        self._ratios.append(seconds / max(linear_s, self.min_step_s))
        self._num_tracked += 1
        self._num_of_size[size] += 1
        if self._num_tracked % SAFETY_EVERY == 0:
            quantile = sorted(self._ratios)[int(SAFETY_QUANTILE * (len(self._ratios) - 1))]
            self.safety = min(max(quantile, 1.0), MAX_SAFETY)

    def usual_ratio(self, ratio: float) -> float:
        """Add a step's measured ÷ predicted, and return the usual one, which is no sign of another pace."""
        return self._usual_ratio.add(ratio)

    def forget_errors(self) -> None:
        """Compute the next safety factor from the steps that follow only."""
        self._ratios.clear()

    def learn(
        self, x: Sequence[float], size: int, seconds: float, expected_s: float, all_steps: Vector, *, is_own: bool
    ) -> None:
        """Learn from a step of this kind (`is_own`) or of the other kind. It makes steps of the same `size` fade.

        `all_steps` are coefficients learned from the steps of both kinds. They are used for features that the steps of
        this kind have not shown yet.
        """
        if is_own:
            self._regression.observe(x, seconds, expected_s, size, all_steps)
            self._theta = tuple(self._regression.theta.tolist())
        elif not self._regression.num_observed:
            self._theta = tuple(all_steps.tolist())

    def _track_min_step(self, seconds: float, linear_s: float) -> None:
        if not self._min_step_s or seconds < self._min_step_s:
            self._min_step_s = seconds
        elif linear_s < NEAR_MIN_STEP * self._min_step_s:
            self._min_step_s *= MIN_STEP_GROWTH

    def _linear_s(self, x: Sequence[float]) -> float:
        k = self._theta
        return k[0] * x[0] + k[1] * x[1] + k[2] * x[2] + k[3] * x[3] + k[4] * x[4]


def features(work: StepWork) -> tuple[float, float, float, float, float]:
    """Return the scaled features x of a step, so that the step's linear prediction is θ·x."""
    s = _SCALE
    return (s[0], s[1] * work.prefill_tokens, s[2] * work.attended, s[3] * work.context_tokens, s[4] * work.decodes)


def theta_of(cost: StepCost) -> Vector:
    """Return the coefficients of `cost` as a vector θ for scaled features."""
    k = (cost.step_s, cost.prefill_token_s, cost.attend_s, cost.context_token_s, cost.decode_s)
    return np.array(k, dtype=np.float64) / _SCALE
