"""Means and ratios over rounds, from samples whose truth is known."""

import math

import numpy as np
import pytest

from bench.engines.comparison_report import geometric_mean


def test_a_single_round_has_a_value_and_no_interval() -> None:
    estimate = geometric_mean([3.0])
    assert estimate.value == pytest.approx(3.0)
    assert (estimate.low, estimate.high) == (0.0, math.inf)


@pytest.mark.parametrize("rounds", [2, 3, 5, 30])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    held = 0
    for _ in range(400):
        estimate = geometric_mean(np.exp(rng.normal(1.0, 0.3, rounds)).tolist())
        held += estimate.low <= math.e <= estimate.high
    assert 360 <= held <= 395  # of 400; 380 expected
