"""Online least squares with forgetting: learns the cost of each feature of a step from measured steps.

The regression minimises the relative error: an error of 10 % counts the same in a short decode and in a long prefill,
for example of 10 ms and of 1 s. All coefficients are ≥ 0. A ridge term pulls each coefficient a little towards a prior.
If the recent steps show nothing about a coefficient, the prior decides its value. The moments are stored rather than
their inverse, because the inverse grows without bound while all steps look alike. Knows numbers only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

FORGETTING = 0.995  # factor on a step's weight at each newer step: the weight halves after about 140 steps
RIDGE = 1e-3  # weight of a coefficient's prior, as a share of the weight that the steps give the coefficient
MIN_RIDGE = 1e-9  # added to that weight, as a share of the largest weight; for coefficients that no step shows
SOLVE_EVERY = 8  # number of steps between two solutions for θ
WARM_STEPS = 16  # number of first steps, each of which is followed by a solution


class StepRegression:
    """The regression T = θ·x with θ ≥ 0, where T is the time of a step and x are the features of the step.

    `theta` has the given value until the first step is observed.
    """

    def __init__(self, theta: Vector) -> None:
        self.theta = theta
        self.num_observed = 0
        self._moments = np.zeros((len(theta), len(theta)))  # Σ forgetting^age · x xᵀ / T²
        self._targets = np.zeros(len(theta))  # Σ forgetting^age · x / T
        self._new: list[Sequence[float]] = []  # x / T of steps that are not in the moments yet

    def observe(self, x: Sequence[float], seconds: float, prior: Vector | None = None) -> None:
        """Learn from a step with features `x` that took `seconds` seconds.

        `prior` holds the coefficients for features that the steps do not show; None: the present θ.
        """
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
    """Return θ ≥ 0 with moments · θ ≈ targets. `moments` must be symmetric and positive definite.

    Coefficients that come out negative are set to zero, and the remaining coefficients are solved again.
    """
    free = np.ones(len(targets), dtype=bool)
    while True:
        theta = np.zeros(len(targets))
        theta[free] = np.linalg.solve(moments[np.ix_(free, free)], targets[free])
        if (theta >= 0).all():
            return theta
        free &= theta > 0
