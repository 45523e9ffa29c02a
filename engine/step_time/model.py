"""A model of how long a step takes, learned online from measured steps.

The formula is in `cost`. Decode-only steps and mixed steps have separate models (`kind`). If all steps become slower
alike, for example on a hot or shared machine, a single factor changes: the slowdown. A few steps suffice to learn the
slowdown, while the coefficients take a few hundred steps.

Knows numbers only; does not know torch, tiers or clocks.
"""

from collections import deque

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.kind import SHORTEST_S, StepKind, features, theta_of
from engine.step_time.regression import WARM_STEPS, StepRegression

ERROR_WINDOW = 256  # number of newest steps from which `mean_absolute_error` is computed
# A measured time above this multiple of its prediction is lowered to this multiple. When errors are computed, a
# prediction above this multiple of the measured time is lowered in the same way.
CLIP_RATIO = 4.0
SLOWDOWN_GAIN = 0.1  # each step multiplies the slowdown by (measured ÷ predicted) ** SLOWDOWN_GAIN
MAX_SLOWDOWN_RATIO = 1.4  # measured ÷ predicted is first clipped to this factor, up or down
MIN_SLOWDOWN, MAX_SLOWDOWN = 0.25, 4.0  # bounds of the slowdown, which is 1 at the start


class StepTimeModel:
    """The step-time model of an engine. It owns the coefficients.

    Call `observe` after each step, and `cost` before the next plan.
    """

    def __init__(self, prior: StepCost | None = None) -> None:
        """Start with the coefficients `prior` (None: the defaults of `StepCost`). Observed steps change them."""
        theta = theta_of(prior or StepCost())
        self._all_steps = StepRegression(theta)
        self._kinds = (StepKind(theta), StepKind(theta))  # decode-only, mixed
        self._slowdown = 1.0
        self._errors: deque[float] = deque(maxlen=ERROR_WINDOW)
        self._costs: list[StepCost | None] = [None, None]  # results of `cost`, until the next step is observed
        self.num_observed = 0

    def cost(self, mixed: bool = True) -> StepCost:
        """Return the present coefficients of mixed or of decode-only steps.

        They are multiplied by a safety factor: the 95th percentile of measured ÷ linearly predicted step times.
        """
        cost = self._costs[mixed]
        if cost is None:
            # Take the smaller minimum of both kinds: even the shortest mixed step seen may have held much work.
            minima = (kind.min_step_s(self._slowdown) for kind in self._kinds if kind.is_tracked)
            cost = self._costs[mixed] = self._kinds[mixed].cost(self._slowdown, min(minima, default=0.0))
        return cost

    def predict(self, work: StepWork) -> float:
        """Return the expected time of a step in seconds, without a safety factor."""
        return self._kinds[work.is_mixed].predict(features(work), work.rows, self._slowdown)

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        """Learn from a step that took `elapsed_s` seconds."""
        kind, x = self._kinds[work.is_mixed], features(work)
        elapsed_s = max(elapsed_s, SHORTEST_S)
        predicted = kind.predict(x, work.rows, self._slowdown)
        self.num_observed += 1
        self._costs = [None, None]
        if self.is_warm:
            self._errors.append(min(predicted, CLIP_RATIO * elapsed_s) / elapsed_s - 1.0)
            if kind.is_outlier(elapsed_s / predicted):
                return
            elapsed_s = min(elapsed_s, CLIP_RATIO * predicted)
            kind.track(x, work.rows, elapsed_s, self._slowdown)
            self._adjust_slowdown(elapsed_s / predicted)
        self._all_steps.observe(x, elapsed_s / self._slowdown)
        for each in self._kinds:
            each.learn(x, elapsed_s / self._slowdown, self._all_steps.theta, is_own=each is kind)

    @property
    def is_warm(self) -> bool:
        """True once enough steps have been observed to predict the next steps."""
        return self.num_observed > WARM_STEPS

    @property
    def mean_absolute_error(self) -> float:
        """The mean of |predicted ÷ measured − 1| over the newest steps; 0 before the first prediction.

        Each step was predicted before it was learned.
        """
        return sum(map(abs, self._errors)) / len(self._errors) if self._errors else 0.0

    def _adjust_slowdown(self, ratio: float) -> None:
        """Adjust the slowdown to a step whose measured ÷ predicted time is `ratio`."""
        change = min(max(ratio, 1.0 / MAX_SLOWDOWN_RATIO), MAX_SLOWDOWN_RATIO) ** SLOWDOWN_GAIN
        self._slowdown = min(max(self._slowdown * change, MIN_SLOWDOWN), MAX_SLOWDOWN)
