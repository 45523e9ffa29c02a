"""The moving average: where it starts, how it moves, and samples of another weight."""

from engine.step_time.ewma import Ewma


def test_it_moves_towards_each_sample_by_its_weight() -> None:
    average = Ewma(0.25, 8.0)
    assert average.add(4.0) == 7.0
    assert average.add(7.0) == average.value == 7.0


def test_a_sample_may_weigh_more_than_usual() -> None:
    average = Ewma(0.1)
    assert average.add(5.0, weight=1.0) == 5.0
