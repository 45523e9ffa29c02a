"""Least squares with forgetting: what a step's features cost, learned from the steps as they come.

Minimises the relative error (a decode of 10 ms and a prefill of 1 s count alike), with coefficients ≥ 0. A ridge term
pulls each coefficient a little towards a prior, which decides where the recent steps show nothing. The moments are kept
rather than their inverse: the inverse grows without bound while all steps look alike. Knows numbers only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

FORGETTING = 0.995  # a step's weight halves after about 140 newer ones
RIDGE = 1e-3  # weight of the prior of each coefficient, as a share of the steps' weight on it
MIN_RIDGE = 1e-9  # the least weight, as a share of the largest weight of all: for a coefficient that no step has shown
SOLVE_EVERY = 8  # steps between two solutions
WARM_STEPS = 16  # first steps, each followed by a solution


class StepRegression:
    """T = θ·x with θ ≥ 0. `theta` is the given one until something else is observed."""

    def __init__(self, theta: Vector) -> None:
        self.theta = theta
        self.num_observed = 0
        self._moments = np.zeros((len(theta), len(theta)))  # Σ forgetting^age · x xᵀ / T²
        self._targets = np.zeros(len(theta))  # Σ forgetting^age · x / T
        self._new: list[Sequence[float]] = []  # x / T of steps that are not in the moments yet

    def observe(self, x: Sequence[float], seconds: float, prior: Vector | None = None) -> None:
        """Take in a step with features `x`. `prior`: θ where the steps show nothing; None: the present one."""
        self.num_observed += 1
        self._new.append([value / seconds for value in x])
        if len(self._new) == SOLVE_EVERY or self.num_observed <= WARM_STEPS:
            self._take_in_new()
            self.theta = self._solve(self.theta if prior is None else prior)

    def _take_in_new(self) -> None:
        rows = np.array(self._new)
        weights = FORGETTING ** np.arange(len(rows) - 1, -1, -1.0)
        weighted = rows * weights[:, np.newaxis]
        fade = FORGETTING ** len(rows)
        self._moments = fade * self._moments + weighted.T @ rows
        self._targets = fade * self._targets + weighted.sum(axis=0)
        self._new.clear()

    def _solve(self, prior: Vector) -> Vector:
        known = self._moments.diagonal()
        ridge = RIDGE * known + MIN_RIDGE * known.max()
        moments = self._moments + np.diag(ridge)
        targets = self._targets + ridge * prior
        return solve_nonnegative(moments, targets)


def solve_nonnegative(moments: Matrix, targets: Vector) -> Vector:
    """Return θ ≥ 0 with moments · θ ≈ targets: negative coefficients are set to zero, and the others solved again.
    `moments` must be symmetric and positive definite."""
    free = np.ones(len(targets), dtype=bool)
    while True:
        theta = np.zeros(len(targets))
        theta[free] = np.linalg.solve(moments[np.ix_(free, free)], targets[free])
        if (theta >= 0).all():
            return theta
        free &= theta > 0
