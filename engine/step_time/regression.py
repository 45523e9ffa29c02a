"""Online least squares with forgetting: learns the cost of each feature of a step from measured steps.

The regression minimises the relative error: an error of 10 % counts the same in a short decode and in a long prefill,
for example of 10 ms and of 1 s. All coefficients are ≥ 0. A ridge term pulls each coefficient a little towards a prior.
If the steps show nothing about a coefficient, the prior decides its value. The moments are stored rather than their
inverse, because the inverse grows without bound while all steps look alike.

A step's weight fades only by newer steps of its size, if the caller tells sizes apart. Otherwise, while the number of
sequences hardly changes, the fixed cost and the cost of a sequence can no longer be told apart once the steps of other
sizes are forgotten. Knows numbers only.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

# Factor on a step's weight at each newer step of its size: the weight halves after about 140 steps.
FORGETTING = 0.995
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
        self._moments: dict[int, Matrix] = {}  # by size: Σ forgetting^age · x xᵀ / E², with E the expected time
        self._targets: dict[int, Vector] = {}  # by size: Σ forgetting^age · x T / E²
        self._new: dict[int, list[Sequence[float]]] = defaultdict(list)  # by size: x / E, T / E; not in the sums yet
        self._num_new = 0

    def observe(
        self, x: Sequence[float], seconds: float, expected_s: float, size: int = 0, prior: Vector | None = None
    ) -> None:
        """Learn from a step with features `x` that took `seconds` seconds.

        Its error counts as a share of `expected_s`. If that is `seconds` itself, the coefficients come out below the
        mean of noisy steps, because a step that happens to be short counts for more than one that happens to be long.
        `size` is any number that steps of about the same size share. `prior` holds the coefficients for features that
        the steps do not show; None: the present θ.
        """
        self.num_observed += 1
        self._new[size].append([*(value / expected_s for value in x), seconds / expected_s])
        self._num_new += 1
        if self._num_new == SOLVE_EVERY or self.num_observed <= WARM_STEPS:
            for each, steps in self._new.items():
                self._take_in(each, steps)
            self._new.clear()
            self._num_new = 0
            self.theta = self._solve(self.theta if prior is None else prior)

    def _take_in(self, size: int, steps: list[Sequence[float]]) -> None:
        rows, ratios = np.array(steps)[:, :-1], np.array(steps)[:, -1]
        weighted = rows * (FORGETTING ** np.arange(len(rows) - 1, -1, -1.0))[:, np.newaxis]
        fade = FORGETTING ** len(rows)
        self._moments[size] = fade * self._moments.get(size, 0.0) + weighted.T @ rows
        self._targets[size] = fade * self._targets.get(size, 0.0) + ratios @ weighted

    def _solve(self, prior: Vector) -> Vector:
        moments = np.sum(list(self._moments.values()), axis=0)
        targets = np.sum(list(self._targets.values()), axis=0)
        known = moments.diagonal()
        ridge = RIDGE * known + MIN_RIDGE * known.max()
        return solve_nonnegative(moments + np.diag(ridge), targets + ridge * prior)


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
