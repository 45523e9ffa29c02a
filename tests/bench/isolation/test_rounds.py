"""The order of the arms from round to round: balanced, whatever their number."""

import pytest

from bench.isolation.arms import Arm
from bench.isolation.rounds import order_of_round


@pytest.mark.parametrize("num_arms", [1, 2, 3, 4, 7])
def test_each_arm_runs_as_often_in_each_place_of_a_round(num_arms: int) -> None:
    arms = [Arm(f"A{number}", ("interactive",), None) for number in range(num_arms)]
    rounds = [order_of_round(arms, round_) for round_ in range(2 * num_arms)]
    assert all(sorted(arm.name for arm in order) == [arm.name for arm in arms] for order in rounds)
    for place in range(num_arms):
        assert sorted(order[place].name for order in rounds) == sorted(2 * [arm.name for arm in arms])


@pytest.mark.parametrize("num_arms", [2, 3, 7])
def test_every_second_round_reverses_the_one_before(num_arms: int) -> None:
    arms = [Arm(f"A{number}", ("interactive",), None) for number in range(num_arms)]
    for round_ in range(0, 8, 2):
        assert order_of_round(arms, round_ + 1) == order_of_round(arms, round_)[::-1]
