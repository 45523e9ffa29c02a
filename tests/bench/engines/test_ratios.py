"""Means and ratios over rounds, from samples whose truth is known."""

import math

import numpy as np
import pytest

from bench.engines.ratios import common_prefix, geometric_mean, paired_ratio


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


def test_a_ratio_does_not_see_what_slows_a_whole_round() -> None:
    slowdown = [1.0, 5.0, 0.2, 2.0]
    estimate = paired_ratio([4.0 * s for s in slowdown], [2.0 * s for s in slowdown])
    assert estimate.value == estimate.low == estimate.high == pytest.approx(2.0)


def test_a_ratio_and_its_inverse_say_the_same() -> None:
    one, other = [1.0, 2.0, 3.0], [2.0, 2.5, 2.0]
    there, back = paired_ratio(one, other), paired_ratio(other, one)
    assert there.value == pytest.approx(1 / back.value)
    assert there.low == pytest.approx(1 / back.high)


@pytest.mark.parametrize(
    ("one", "other", "tokens"), [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([1], [1, 2], 1), ([], [1], 0)]
)
def test_answers_agree_until_their_first_difference(one: list[int], other: list[int], tokens: int) -> None:
    assert common_prefix(one, other) == tokens
