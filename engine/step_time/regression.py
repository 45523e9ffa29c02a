"""Least squares that forgets: what a step's features cost, learned from the steps as they come.

Minimises the relative error (a decode of 10 ms and a prefill of 1 s count alike), with coefficients ≥ 0 and a small
pull towards others for what the recent steps say nothing about. The moments are kept rather than their inverse: the
recursive form winds up when steps look alike for long. Knows numbers only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

FORGETTING = 0.995  # a step's weight halves after about 140 newer ones
PULL = 1e-3  # on each coefficient, as a share of what the steps say about it
LEAST_PULL = 1e-9  # of the strongest: on what no step has shown
SOLVE_EVERY = 8
WARM_STEPS = 16  # solved after each of these


class StepRegression:
    """T = θ·x with θ ≥ 0. `theta` starts as the given one, and is what holds where nothing was observed."""

    def __init__(self, theta: Vector) -> None:
        self.theta = theta
        self.num_observed = 0
        self._moments = np.zeros((len(theta), len(theta)))  # Σ forgetting^age · x xᵀ / T²
        self._targets = np.zeros(len(theta))  # Σ forgetting^age · x / T
        self._rows: list[Sequence[float]] = []  # x / T, not yet in the moments

    def observe(self, x: Sequence[float], seconds: float, pull_to: Vector | None = None) -> None:
        """`pull_to`: what is believed where the steps say nothing; None: the present coefficients."""
        self.num_observed += 1
        self._rows.append([value / seconds for value in x])
        if len(self._rows) == SOLVE_EVERY or self.num_observed <= WARM_STEPS:
            self._take_rows()
            self.theta = self._solve(self.theta if pull_to is None else pull_to)

    def _take_rows(self) -> None:
        rows = np.array(self._rows)
        weights = FORGETTING ** np.arange(len(rows) - 1, -1, -1.0)
        weighted = rows * weights[:, np.newaxis]
        fade = FORGETTING ** len(rows)
        self._moments = fade * self._moments + weighted.T @ rows
        self._targets = fade * self._targets + weighted.sum(axis=0)
        self._rows.clear()

    def _solve(self, towards: Vector) -> Vector:
        """Ridge regression towards `towards`."""
        known = self._moments.diagonal()
        pull = PULL * known + LEAST_PULL * known.max()
        moments = self._moments + np.diag(pull)
        targets = self._targets + pull * towards
        return solve_nonnegative(moments, targets)


def solve_nonnegative(moments: Matrix, targets: Vector) -> Vector:
    """θ ≥ 0 with moments · θ ≈ targets: what comes out negative is set to zero, and the rest solved again. `moments`
    is symmetric and positive definite."""
    free = np.ones(len(targets), dtype=bool)
    while True:
        theta = np.zeros(len(targets))
        theta[free] = np.linalg.solve(moments[np.ix_(free, free)], targets[free])
        if (theta >= 0).all():
            return theta
        free &= theta > 0
