"""The cost of one kind of step (decode-only or mixed), learned online from measured steps.

A linear model of the work (`StepRegression`) gives the coefficients. A correction by the number of rows replaces its
prediction where it fits poorly (`RowTable`), no prediction is below the shortest step seen, and a safety factor raises
the coefficients that a planner gets. Knows numbers only.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.regression import StepRegression, Vector
from engine.step_time.row_correction import RowTable

SHORTEST_S = 1e-6  # seconds; no prediction and no measurement counts as less
OUTLIER_RATIO = 3.0  # measured ÷ predicted; a step above it is dropped, unless the one before it was above, too
SAFETY_QUANTILE = 0.95  # of measured ÷ predicted: the safety factor covers this share of the steps
SAFETY_WINDOW = 256  # newest steps that the quantile is taken of
SAFETY_EVERY = 16  # steps between two updates of the safety factor
MAX_SAFETY = 2.0
MIN_STEP_GROWTH = (
    1.002  # factor on the minimum step time at each step near it: a minimum no longer reached rises slowly
)
NEAR_MIN_STEP = 1.2  # a step is near the minimum if its linear prediction is below this multiple of it
# The minimum step time is at most this multiple of one decode's linear prediction: if all steps seen were long, none of
# them shows the minimum.
MAX_MIN_STEP = 2.0

# Bring the features to comparable size: 1, P, A, C, D as in `cost`.
_SCALE = (1.0, 1e-2, 1e-5, 1e-4, 1e-2)


class StepKind:
    """The model of one kind of step. Seconds passed to `learn` and `all_steps` are without the engine's slowdown;
    everything else is as measured."""

    def __init__(self, theta: Vector) -> None:
        self._regression = StepRegression(theta)
        self._theta: tuple[float, ...] = tuple(theta.tolist())
        self._correction = RowTable()
        self._min_step_s = 0.0
        self._ratios: deque[float] = deque(maxlen=SAFETY_WINDOW)  # measured ÷ predicted
        self._num_tracked = 0
        self._safety = 1.0
        self._was_slow = False

    @property
    def is_tracked(self) -> bool:
        return self._num_tracked > 0

    def cost(self, slowdown: float, min_step_s: float) -> StepCost:
        """Return the present coefficients, times slowdown and safety factor."""
        k = [value * scale * slowdown * self._safety for value, scale in zip(self._theta, _SCALE, strict=True)]
        return StepCost(k[0], k[1], k[2], k[3], k[4], min_step_s * self._safety)

    def predict(self, x: Sequence[float], rows: int, slowdown: float) -> float:
        """Return the expected seconds of a step with features `x` and `rows` tokens."""
        return max(self._linear_s(x) * self._correction.ratio(rows) * slowdown, self.min_step_s(slowdown), SHORTEST_S)

    def min_step_s(self, slowdown: float) -> float:
        """Return the shortest step seen, within bounds."""
        one_decode_s = self._theta[0] + self._theta[4] * _SCALE[4]
        return min(self._min_step_s, MAX_MIN_STEP * one_decode_s * slowdown)

    def is_outlier(self, ratio: float) -> bool:
        """Return whether to drop a step that took `ratio` times its prediction: a slow step after a normal one. A page
        fault does not repeat; an engine that has become slower is slow again at the next step of this kind."""
        was_slow, self._was_slow = self._was_slow, ratio > OUTLIER_RATIO
        return self._was_slow and not was_slow

    def track(self, x: Sequence[float], rows: int, elapsed_s: float, slowdown: float) -> None:
        """Take in the error of the linear prediction for a step, before the step is learned."""
        linear_s = max(self._linear_s(x) * slowdown, SHORTEST_S)
        self._correction.observe(rows, elapsed_s / linear_s)
        self._track_min_step(elapsed_s, linear_s)
        self._ratios.append(elapsed_s / max(linear_s, self.min_step_s(slowdown)))
        self._num_tracked += 1
        if self._num_tracked % SAFETY_EVERY == 0:
            quantile = sorted(self._ratios)[int(SAFETY_QUANTILE * len(self._ratios))]
            self._safety = min(max(quantile, 1.0), MAX_SAFETY)

    def learn(self, x: Sequence[float], seconds: float, all_steps: Vector, *, is_own: bool) -> None:
        """Learn a step of this kind (`is_own`) or of the other one. `all_steps`: coefficients learned from both kinds,
        which hold for what this kind has not shown."""
        if is_own:
            self._regression.observe(x, seconds, all_steps)
            self._theta = tuple(self._regression.theta.tolist())
        elif not self._regression.num_observed:
            self._theta = tuple(all_steps.tolist())

    def _track_min_step(self, elapsed_s: float, linear_s: float) -> None:
        if not self._min_step_s or elapsed_s < self._min_step_s:
            self._min_step_s = elapsed_s
        elif linear_s < NEAR_MIN_STEP * self._min_step_s:
            self._min_step_s *= MIN_STEP_GROWTH

    def _linear_s(self, x: Sequence[float]) -> float:
        k = self._theta
        return k[0] * x[0] + k[1] * x[1] + k[2] * x[2] + k[3] * x[3] + k[4] * x[4]


def features(work: StepWork) -> tuple[float, float, float, float, float]:
    """Return the scaled features x of a step, so that its linear prediction is θ·x."""
    s = _SCALE
    return (s[0], s[1] * work.prefill_tokens, s[2] * work.attended, s[3] * work.context_tokens, s[4] * work.decodes)


def theta_of(cost: StepCost) -> Vector:
    """Return the coefficients θ for scaled features."""
    k = (cost.step_s, cost.prefill_token_s, cost.attend_s, cost.context_token_s, cost.decode_s)
    return np.array(k, dtype=np.float64) / _SCALE
