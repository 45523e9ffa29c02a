"""How long will a step take? Learned online from what was measured.

    T = max(floor, k_step + k_prefill·P + k_attend·Σ p(c + p/2) + k_context·Σ c + k_decode·D)

with P prefill tokens in chunks p behind c cached tokens, and D decodes with c tokens of context each. Because T is a
sum over the work, a batch is filled in O(1) a sequence. Decode-only and mixed steps have coefficients of their own, and
a table by the number of rows corrects the line where it fits poorly. What makes every kind of step slower alike (a hot
or shared machine) is the pace: a few steps tell it, while coefficients take a few hundred.

Knows numbers only; not torch, not tiers, not clocks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.step_time.regression import WARM_STEPS, StepRegression, Vector
from engine.step_time.row_correction import RowTable

OUTLIER_RATIO = 3.0  # a step this much slower than predicted is dropped; of two in a row, the second is believed …
CLIP_RATIO = 4.0  # … as far as this
SAFETY_QUANTILE = 0.95
SAFETY_WINDOW = 256
SAFETY_EVERY = 16
SAFETY_MAX = 2.0
PACE_GAIN = 0.1  # how much of a step's deviation is taken for a change of the engine's pace
PACE_STEP = 1.4  # no step's deviation counts as more than this factor
PACE_MIN, PACE_MAX = 0.25, 4.0
FLOOR_CREEP = 1.002  # a floor below which no step falls any more rises this slowly, at the steps that are near it
NEAR_FLOOR = 1.2
FLOOR_MAX = 2.0  # times what the line says of one decode: where all steps were long, none of them was at the floor
LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class StepCost:
    """The model frozen at one instant; all results in seconds."""

    step_s: float = 0.004
    prefill_token_s: float = 0.0002
    attend_s: float = 0.0
    context_token_s: float = 0.0
    decode_s: float = 0.0002
    floor_s: float = 0.0  # no step is shorter, however little is in it

    def prefill(self, num_tokens: int, context: int) -> float:
        """A chunk of `num_tokens` behind `context` cached tokens."""
        attended = num_tokens * (context + num_tokens / 2)
        return self.prefill_token_s * num_tokens + self.attend_s * attended

    def decode(self, context: int) -> float:
        return self.decode_s + self.context_token_s * context

    def step(self, work_s: float) -> float:
        """A whole step whose runs take `work_s` together."""
        return max(self.floor_s, self.step_s + work_s)

    def run(self, num_tokens: int, context: int) -> float:
        return self.decode(context) if num_tokens == 1 else self.prefill(num_tokens, context)

    def of(self, work: "StepWork") -> float:
        """The whole step."""
        prefills = self.prefill_token_s * work.prefill_tokens + self.attend_s * work.attended
        decodes = self.decode_s * work.decodes + self.context_token_s * work.context_tokens
        return self.step(prefills + decodes)


@dataclass(slots=True)
class StepWork:
    """The features of one step, summed while a plan is made."""

    prefill_tokens: int = 0
    attended: float = 0.0
    context_tokens: int = 0
    decodes: int = 0
    prefills: int = 0  # chunks

    def add(self, num_tokens: int, context: int) -> None:
        if num_tokens == 1:
            self.decodes += 1
            self.context_tokens += context
        else:
            self.prefills += 1
            self.prefill_tokens += num_tokens
            self.attended += num_tokens * (context + num_tokens / 2)

    @property
    def rows(self) -> int:
        return self.prefill_tokens + self.decodes

    @property
    def is_mixed(self) -> bool:
        """It holds a prefill, be it alone."""
        return self.prefills > 0


# Brings the features to comparable size.
_SCALE = (1.0, 1e-2, 1e-5, 1e-4, 1e-2)


class StepTimeModel:
    """Owner of the coefficients. `observe` after each step, `cost` before the next plan."""

    def __init__(self, prior: StepCost | None = None) -> None:
        theta = _theta(prior or StepCost())
        self._every_step = StepRegression(theta)  # what one kind of step has not shown, all together say
        self._kinds = (_Kind(theta), _Kind(theta))  # decode-only, mixed
        self._pace = 1.0
        self._errors: deque[float] = deque(maxlen=SAFETY_WINDOW)
        self._costs: list[StepCost | None] = [None, None]
        self.num_observed = 0

    def cost(self, mixed: bool = True) -> StepCost:
        """The present coefficients of steps with a prefill (or of those without), times the 95th percentile of
        measured ÷ linearly predicted."""
        cost = self._costs[mixed]
        if cost is None:
            # The least of both kinds: the shortest mixed step that was seen may have held much.
            floor_s = min((kind.floor(self._pace) for kind in self._kinds if kind.is_tracked), default=0.0)
            cost = self._costs[mixed] = self._kinds[mixed].cost(self._pace, floor_s)
        return cost

    def predict(self, work: StepWork) -> float:
        """Expected seconds, without a safety factor."""
        return self._kinds[work.is_mixed].predict(_features(work), work.rows, self._pace)

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        kind, x = self._kinds[work.is_mixed], _features(work)
        elapsed_s = max(elapsed_s, LEAST_S)
        predicted = kind.predict(x, work.rows, self._pace)
        self.num_observed += 1
        self._costs = [None, None]
        if self.is_warm:
            self._errors.append(min(predicted, CLIP_RATIO * elapsed_s) / elapsed_s - 1.0)
            if kind.is_outlier(elapsed_s / predicted):
                return
            elapsed_s = min(elapsed_s, CLIP_RATIO * predicted)
            kind.track(x, work.rows, elapsed_s, self._pace)
            self._follow(elapsed_s / predicted)
        self._every_step.observe(x, elapsed_s / self._pace)
        for each in self._kinds:
            each.learn(x, elapsed_s / self._pace, self._every_step.theta, is_own=each is kind)

    def _follow(self, ratio: float) -> None:
        step = min(max(ratio, 1.0 / PACE_STEP), PACE_STEP) ** PACE_GAIN
        self._pace = min(max(self._pace * step, PACE_MIN), PACE_MAX)

    @property
    def is_warm(self) -> bool:
        """It has seen enough steps to be believed about others than those."""
        return self.num_observed > WARM_STEPS

    @property
    def mean_absolute_error(self) -> float:
        """Mean of |predicted ÷ measured − 1| over the last steps, each predicted before it was learned; 0 before."""
        return sum(map(abs, self._errors)) / len(self._errors) if self._errors else 0.0


class _Kind:
    """Steps with a prefill, or those without: their coefficients, table, floor and safety factor."""

    def __init__(self, theta: Vector) -> None:
        self._line = StepRegression(theta)
        self._theta: tuple[float, ...] = tuple(theta.tolist())
        self._table = RowTable()
        self._floor_s = 0.0
        self._ratios: deque[float] = deque(maxlen=SAFETY_WINDOW)
        self._num_tracked = 0
        self._safety = 1.0
        self._is_suspicious = False

    @property
    def is_tracked(self) -> bool:
        return self._num_tracked > 0

    def cost(self, pace: float, floor_s: float) -> StepCost:
        k = [value * scale * pace * self._safety for value, scale in zip(self._theta, _SCALE, strict=True)]
        return StepCost(k[0], k[1], k[2], k[3], k[4], floor_s * self._safety)

    def predict(self, x: Sequence[float], rows: int, pace: float) -> float:
        return max(self._linear_s(x) * self._table.ratio(rows) * pace, self.floor(pace), LEAST_S)

    def floor(self, pace: float) -> float:
        one_decode_s = self._theta[0] + self._theta[4] * _SCALE[4]
        return min(self._floor_s, FLOOR_MAX * one_decode_s * pace)

    def _linear_s(self, x: Sequence[float]) -> float:
        k = self._theta
        return k[0] * x[0] + k[1] * x[1] + k[2] * x[2] + k[3] * x[3] + k[4] * x[4]

    def is_outlier(self, ratio: float) -> bool:
        """A page fault says little; an engine that is slower says it again, at its next step of this kind."""
        was_suspicious, self._is_suspicious = self._is_suspicious, ratio > OUTLIER_RATIO
        return self._is_suspicious and not was_suspicious

    def track(self, x: Sequence[float], rows: int, elapsed_s: float, pace: float) -> None:
        """What the line is wrong by, before it learns from the step."""
        linear_s = max(self._linear_s(x) * pace, LEAST_S)
        self._table.observe(rows, elapsed_s / linear_s)
        if not self._floor_s or elapsed_s < self._floor_s:
            self._floor_s = elapsed_s
        elif linear_s < NEAR_FLOOR * self._floor_s:
            self._floor_s *= FLOOR_CREEP
        self._ratios.append(elapsed_s / max(linear_s, self.floor(pace)))
        self._num_tracked += 1
        if self._num_tracked % SAFETY_EVERY == 0:
            quantile = sorted(self._ratios)[int(SAFETY_QUANTILE * len(self._ratios))]
            self._safety = min(max(quantile, 1.0), SAFETY_MAX)

    def learn(self, x: Sequence[float], seconds: float, every_step: Vector, *, is_own: bool) -> None:
        if is_own:
            self._line.observe(x, seconds, every_step)
            self._theta = tuple(self._line.theta.tolist())
        elif not self._line.num_observed:  # it has seen nothing of its own
            self._theta = tuple(every_step.tolist())


def _features(work: StepWork) -> tuple[float, float, float, float, float]:
    s = _SCALE
    return (s[0], s[1] * work.prefill_tokens, s[2] * work.attended, s[3] * work.context_tokens, s[4] * work.decodes)


def _theta(cost: StepCost) -> Vector:
    k = (cost.step_s, cost.prefill_token_s, cost.attend_s, cost.context_token_s, cost.decode_s)
    return np.array(k, dtype=np.float64) / _SCALE
