"""How long will a step take? A linear model of what is in it, learned online from what was measured.

    T = k_step + k_prefill·P + k_attend·Σ p(c + p/2) + k_context·Σ c + k_decode·D

with P prefill tokens in chunks p behind c cached tokens, and D decodes with c tokens of context each. Because T is a
sum over the work, a batch is filled in O(1) a sequence. Knows numbers only; not torch, not tiers, not clocks.

Learned by least squares with exponential forgetting, with coefficients ≥ 0 and a small ridge towards those of before:
what the recent steps say nothing about stays as it was. The moments are kept rather than their inverse: the recursive
form winds up when steps look alike for long.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FORGETTING = 0.995  # a step's weight halves after about 140 newer ones
OUTLIER_RATIO = 4.0  # no step counts as slower than this: a page fault says little, a slower engine says it again
SAFETY_QUANTILE = 0.95
SAFETY_WINDOW = 256
RIDGE = 1e-3
WARM_STEPS = 16  # solved after each of these, and taken at their word
SOLVE_EVERY = 8


@dataclass(frozen=True, slots=True)
class StepCost:
    """The model frozen at one instant; all results in seconds."""

    step_s: float = 0.004
    prefill_token_s: float = 0.0002
    attend_s: float = 0.0
    context_token_s: float = 0.0
    decode_s: float = 0.0002

    def prefill(self, num_tokens: int, context: int) -> float:
        """A chunk of `num_tokens` behind `context` cached tokens."""
        attended = num_tokens * (context + num_tokens / 2)
        return self.prefill_token_s * num_tokens + self.attend_s * attended

    def decode(self, context: int) -> float:
        return self.decode_s + self.context_token_s * context

    def run(self, num_tokens: int, context: int) -> float:
        return self.decode(context) if num_tokens == 1 else self.prefill(num_tokens, context)


@dataclass(slots=True)
class StepWork:
    """The features of one step, summed while a plan is made."""

    prefill_tokens: int = 0
    attended: float = 0.0
    context_tokens: int = 0
    decodes: int = 0

    def add(self, num_tokens: int, context: int) -> None:
        if num_tokens == 1:
            self.decodes += 1
            self.context_tokens += context
        else:
            self.prefill_tokens += num_tokens
            self.attended += num_tokens * (context + num_tokens / 2)

    def features(self) -> NDArray[np.float64]:
        values = (1.0, self.prefill_tokens, self.attended, self.context_tokens, self.decodes)
        return np.array(values, dtype=np.float64)


class StepTimeModel:
    """Owner of the coefficients. `observe` after each step, `cost` before the next plan."""

    # Brings the features to comparable size, so that one ridge suits all of them.
    _SCALE = np.array([1.0, 1e-2, 1e-5, 1e-4, 1e-2])

    def __init__(self, prior: StepCost | None = None) -> None:
        prior = prior or StepCost()
        start = (prior.step_s, prior.prefill_token_s, prior.attend_s, prior.context_token_s, prior.decode_s)
        self._theta = np.array(start, dtype=np.float64) / self._SCALE
        self._moments = np.zeros((5, 5))  # Σ forgetting^age · x xᵀ
        self._targets = np.zeros(5)  # Σ forgetting^age · x T
        self._ratios: deque[float] = deque(maxlen=SAFETY_WINDOW)
        self._safety = 1.0
        self.num_observed = 0

    def cost(self) -> StepCost:
        """The present coefficients, times the 95th percentile of measured ÷ predicted."""
        k = [float(v) for v in self._theta * self._SCALE * self._safety]
        return StepCost(k[0], k[1], k[2], k[3], k[4])

    def predict(self, work: StepWork) -> float:
        """Expected seconds, without the safety factor."""
        return float(self._theta @ (work.features() * self._SCALE))

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        predicted = max(self.predict(work), 1e-6)
        self.num_observed += 1
        if self.num_observed > WARM_STEPS:
            elapsed_s = min(elapsed_s, OUTLIER_RATIO * predicted)
            self._track(elapsed_s / predicted)
        x = work.features() * self._SCALE
        self._moments = FORGETTING * self._moments + np.outer(x, x)
        self._targets = FORGETTING * self._targets + x * elapsed_s
        if self.num_observed <= WARM_STEPS or self.num_observed % SOLVE_EVERY == 0:
            self._theta = self._solve()

    def _solve(self) -> NDArray[np.float64]:
        """Ridge regression towards the present coefficients, without negative ones: what comes out negative is set to
        zero and the rest solved again."""
        free = np.ones(5, dtype=bool)
        moments = self._moments + RIDGE * np.eye(5)
        targets = self._targets + RIDGE * self._theta
        while True:
            theta = np.zeros(5)
            theta[free] = np.linalg.solve(moments[np.ix_(free, free)], targets[free])
            if (theta >= 0).all():
                return theta
            free &= theta > 0

    def _track(self, ratio: float) -> None:
        self._ratios.append(ratio)
        if len(self._ratios) >= 16 and len(self._ratios) % 16 == 0:
            self._safety = float(np.clip(np.quantile(self._ratios, SAFETY_QUANTILE), 1.0, 2.0))

    @property
    def mean_absolute_error(self) -> float:
        """Mean of |measured ÷ predicted − 1| over the last steps; 0 before any."""
        return float(np.mean([abs(r - 1.0) for r in self._ratios])) if self._ratios else 0.0
