"""Least squares with forgetting: what it learns, and what it must not forget."""

import random

import numpy as np
import pytest

from engine.step_time.regression import StepRegression, solve_nonnegative

TRUE = np.array([0.02, 0.3, 0.0, 0.05])


def steps(count: int, seed: int = 1) -> list[list[float]]:
    rng = random.Random(seed)
    return [[1.0, rng.random(), rng.random(), rng.random()] for _ in range(count)]


def taught(true: np.ndarray, rows: list[list[float]], noise: float = 0.0) -> StepRegression:
    rng = random.Random(2)
    regression = StepRegression(np.full(4, 0.1))
    for x in rows:
        seconds = float(true @ x) * rng.gauss(1.0, noise)
        regression.observe(x, seconds, seconds)
    return regression


def test_noise_averages_out_and_makes_nothing_negative() -> None:
    theta = taught(TRUE, steps(600), noise=0.1).theta
    assert theta == pytest.approx(TRUE, abs=0.03)
    assert (theta >= 0).all()


def test_a_coefficient_that_would_be_negative_is_zero_and_the_rest_is_solved_again() -> None:
    x = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    seconds = np.array([3.0, 2.0, 1.0])  # falls with the second feature
    assert solve_nonnegative(x.T @ x, x.T @ seconds) == pytest.approx([2.0, 0.0])


def test_short_steps_count_as_much_as_long_ones() -> None:
    """The regression minimises the relative error, not the absolute one."""
    regression = StepRegression(np.array([1.0]))
    for seconds in [1.0, 4.0] * 50:
        regression.observe([1.0], seconds, seconds)
    assert regression.theta[0] < 2.0, "the mean is 2.5; 1.47 has the least relative error"


def test_the_mean_is_learned_where_steps_of_one_length_were_expected() -> None:
    regression = StepRegression(np.array([1.0]))
    for seconds in [1.0, 4.0] * 500:
        regression.observe([1.0], seconds, 2.0)
    assert regression.theta[0] == pytest.approx(2.5, rel=0.02)


def test_the_prior_holds_where_no_step_shows_anything() -> None:
    regression = StepRegression(np.array([0.1, 0.1]))
    prior = np.array([0.5, 0.7])
    for seconds in (0.2, 0.21, 0.19) * 20:
        regression.observe([1.0, 0.0], seconds, seconds, prior=prior)
    assert regression.theta == pytest.approx([0.2, 0.7], rel=0.02)


def test_many_equal_steps_keep_it_stable_and_well_conditioned() -> None:
    """The covariance of recursive least squares would have grown by 0.995^-20000, more than a float holds."""
    regression = taught(TRUE, steps(300))
    x = [1.0, 0.5, 0.5, 0.5]
    for _ in range(20_000):
        regression.observe(x, float(TRUE @ x), float(TRUE @ x))
    assert float(regression.theta @ x) == pytest.approx(float(TRUE @ x), rel=1e-3)
    assert regression.theta == pytest.approx(TRUE, abs=0.02), "the coefficients learned before are kept"
    regression.observe([1.0, 0.0, 0.0, 1.0], 0.07, 0.07)
    assert np.isfinite(regression.theta).all()


def test_it_forgets() -> None:
    rows = steps(1600)
    regression = taught(TRUE, rows[:800])
    for x in rows[800:]:
        regression.observe(x, 1.3 * float(TRUE @ x), 1.3 * float(TRUE @ x))
    assert regression.theta == pytest.approx(1.3 * TRUE, rel=0.03, abs=1e-3)
