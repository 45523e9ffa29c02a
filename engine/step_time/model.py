"""A model of how long a step takes, learned online from measured steps.

The formula is in `cost`. Decode-only steps and mixed steps have separate models (`kind`). If all steps become slower
alike, for example because another program uses the machine, a single factor changes: the slowdown. A few steps suffice
to learn the slowdown, while the coefficients take a few hundred steps.

A step far from its prediction is held back until the next steps tell what it was. If they are as far off, the engine
has another pace: the slowdown changes at once, and the coefficients stay. Otherwise the step is learned, as a step that
deviates by `PACE_CHANGE`. But a step of a size that was hardly seen yet is learned as it is.

Slowdown and coefficients are learned from the same steps, which show only their product. Whatever moves one of them in
each step moves the other one the other way, without an end, and the costs of a kind of step that does not run meanwhile
become wrong by as much. So the coefficients are a mean of noisy steps, the usual measured ÷ predicted is no drift, and
the slowdown goes back to 1 within some thousand steps, while the coefficients take it over. After 6,000 decode-only
steps with noise of 10, 20 and 40 %, mixed steps are predicted 1.03, 1.1 and 1.2 times as long as they are. Without
these three it was 1.55, 23 and 40,000 times. Knows numbers only; does not know torch, tiers or clocks.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from engine.step_time.cost import StepCost, StepWork
from engine.step_time.kind import SHORTEST_S, StepKind, features, theta_of
from engine.step_time.regression import WARM_STEPS, StepRegression

ERROR_WINDOW = 256  # number of newest steps from which `mean_absolute_error` is computed
# A step deviates if its measured time is more than `PACE_CHANGE` times its predicted time, or less than the predicted
# time divided by `PACE_CHANGE`. `PACE_STEPS` deviating steps in a row, all slower or all faster, are another pace.
PACE_CHANGE = 1.5
PACE_STEPS = 5
# Any other step of known length, and from the second step in a row any that deviates, multiplies the slowdown by
# exp(DRIFT_GAIN · (r − usual r)), where r is measured ÷ predicted, limited to `PACE_CHANGE`.
DRIFT_GAIN = 0.1
# Each step brings the logarithm of the slowdown closer to 0 by this share.
SLOWDOWN_DECAY = 0.0005


@dataclass(frozen=True, slots=True)
class _Step:
    """A measured step, and what the model says of it."""

    kind: StepKind
    x: Sequence[float]  # features
    size: int  # the same for steps of about as many tokens, up to a factor of two
    elapsed_s: float
    pace: float  # the slowdown with which the prediction would have been exact


class StepTimeModel:
    """The step-time model of an engine. It owns the coefficients.

    Call `observe` after each step, and `cost` before the next plan.
    """

    def __init__(self, prior: StepCost | None = None, *, remembers_sizes: bool = False) -> None:
        """Start with the coefficients `prior` (None: the defaults of `StepCost`). Observed steps change them.

        With `remembers_sizes`, steps are forgotten only for newer ones of about as many tokens. Then the cost of a
        sequence stays known while the number of sequences hardly changes, as on a server that is only seen from
        outside: where steps vary by 10 %, the ratio of the times of steps with 36 and with 4 sequences is 2 % wrong
        (50 % without it). Without it, the model follows an engine's own steps sooner.
        """
        self._remembers_sizes = remembers_sizes
        theta = theta_of(prior or StepCost())
        self._all_steps = StepRegression(theta)
        self._kinds = (StepKind(theta), StepKind(theta))  # decode-only, mixed
        self._slowdown = 1.0
        self._deviating: list[_Step] = []  # the newest steps, if they deviate in the same direction; not learned yet
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
            min_step_s = min((kind.min_step_s for kind in self._kinds if kind.is_tracked), default=0.0)
            cost = self._costs[mixed] = self._kinds[mixed].cost(self._slowdown, min_step_s)
        return cost

    @property
    def safety(self) -> float:
        """The larger safety factor of the two kinds of step."""
        return max(kind.safety for kind in self._kinds)

    def predict(self, work: StepWork) -> float:
        """Return the expected time of a step in seconds, without a safety factor."""
        return self._kinds[work.is_mixed].predict(features(work)) * self._slowdown

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        """Learn from a step that took `elapsed_s` seconds."""
        elapsed_s = max(elapsed_s, SHORTEST_S)
        kind, x = self._kinds[work.is_mixed], features(work)
        step = _Step(kind, x, work.rows.bit_length(), elapsed_s, elapsed_s / kind.predict(x))
        self.num_observed += 1
        self._costs = [None, None]
        if not self.is_warm:
            self._learn(step)
            return
        self._errors.append(self._slowdown / step.pace - 1.0)
        if not kind.knows(step.size):
            self._track(step)  # even if it deviates: the coefficients may be wrong
        elif self._deviates(step):
            self._hold(step)
        else:
            self._release()
            self._drift(step)
            self._track(step)

    @property
    def is_warm(self) -> bool:
        """True once enough steps have been observed to predict the next steps."""
        return self.num_observed > WARM_STEPS

    @property
    def knows_decodes(self) -> bool:
        """Whether enough decode-only steps have been observed to predict them."""
        return self._kinds[False].is_known

    @property
    def mean_absolute_error(self) -> float:
        """The mean of |predicted ÷ measured − 1| over the newest steps; 0 before the first prediction.

        Each step was predicted before it was learned.
        """
        return sum(map(abs, self._errors)) / len(self._errors) if self._errors else 0.0

    # -- the engine's pace -------------------------------------------------------------------------------------------

    def _deviates(self, step: _Step) -> bool:
        return not 1 / PACE_CHANGE <= step.pace / self._slowdown <= PACE_CHANGE

    def _hold(self, step: _Step) -> None:
        """Hold a deviating step back. With enough of them in a row, set the slowdown to the new pace.

        These steps are not learned, because the engine may have changed its pace during one of them.
        """
        is_slower = step.pace > self._slowdown
        if self._deviating and (self._deviating[0].pace > self._slowdown) != is_slower:
            self._release()
        if self._deviating:  # a single deviating step may be due to a page fault: it moves nothing
            self._drift(step)
        self._deviating.append(step)
        if len(self._deviating) == PACE_STEPS:
            self._slowdown = median(each.pace for each in self._deviating)
            self._deviating.clear()
            for kind in self._kinds:
                kind.forget_errors()

    def _drift(self, step: _Step) -> None:
        ratio = _limited(step.pace / self._slowdown)
        self._slowdown *= math.exp(DRIFT_GAIN * (ratio - step.kind.usual_ratio(ratio)))

    def _release(self) -> None:
        """Learn the steps that were held back: the engine's pace is the same as before."""
        for step in self._deviating:
            self._track(step)
        self._deviating.clear()

    def _track(self, step: _Step) -> None:
        self._slowdown **= 1 - SLOWDOWN_DECAY
        step.kind.track(step.x, step.size, step.elapsed_s / self._slowdown)
        self._learn(step)

    def _learn(self, step: _Step) -> None:
        seconds = expected_s = step.elapsed_s / self._slowdown
        if step.kind.knows(step.size):
            expected_s = step.kind.predict(step.x)
            seconds = expected_s * _limited(seconds / expected_s)
        size = step.size if self._remembers_sizes else 0
        self._all_steps.observe(step.x, seconds, expected_s, size)
        for kind in self._kinds:
            kind.learn(step.x, size, seconds, expected_s, self._all_steps.theta, is_own=kind is step.kind)


def _limited(ratio: float) -> float:
    """Return measured ÷ predicted within the limits of a step that deviates."""
    return min(max(ratio, 1 / PACE_CHANGE), PACE_CHANGE)
