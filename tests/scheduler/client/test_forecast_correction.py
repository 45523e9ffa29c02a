"""Predicted waits against real ones: the factor finds the bias, whichever way, and forgets nothing without events."""

import random

import pytest

from scheduler.client.forecast_correction import LEAST, MOST, ForecastCorrection


def live(hindsight: ForecastCorrection, ratio: float, count: int = 2000, spread: float = 0.1) -> list[bool]:
    """`count` requests that wait `ratio` times what was predicted; which of them waited longer than the factor says."""
    rng, late = random.Random(1), []
    for n in range(count):
        actual_s = 0.1 + 0.3 * ratio * rng.uniform(1 - spread, 1 + spread)
        late.append(actual_s > 0.1 + 0.3 * hindsight.factor("realtime"))
        hindsight.expect(f"r{n}", "realtime", float(n), own_s=0.1, wait_s=0.3)
        hindsight.first_token(f"r{n}", n + actual_s)
    return late


@pytest.mark.parametrize("ratio", [0.7, 1.0, 2.5])
def test_few_waits_are_longer_than_the_factor_says_once_it_is_learned(ratio: float) -> None:
    hindsight = ForecastCorrection()
    late = live(hindsight, ratio)
    assert hindsight.factor("realtime") == pytest.approx(ratio * 1.1, rel=0.15)
    assert sum(late[-1000:]) <= 50


@pytest.mark.parametrize(("ratio", "bound"), [(0.01, LEAST), (100.0, MOST)])
def test_the_factor_is_bounded(ratio: float, bound: float) -> None:
    hindsight = ForecastCorrection()
    live(hindsight, ratio)
    assert hindsight.factor("realtime") == pytest.approx(bound, rel=0.05)


def test_it_recovers_from_a_stall() -> None:
    hindsight = ForecastCorrection()
    live(hindsight, 50.0, count=100)
    live(hindsight, 1.0, count=4000)
    assert hindsight.factor("realtime") < 1.3


def test_only_first_tokens_of_what_was_predicted_teach() -> None:
    hindsight = ForecastCorrection()
    hindsight.first_token("unknown", 5.0)
    hindsight.expect("gone", "realtime", 0.0, 0.1, 0.1)
    hindsight.forget("gone")
    hindsight.first_token("gone", 50.0)
    hindsight.expect("twice", "realtime", 0.0, 0.1, 0.1)
    hindsight.first_token("twice", 0.15)
    once = hindsight.factor("realtime")
    hindsight.first_token("twice", 50.0)
    assert hindsight.factor("realtime") == once < 1.0
    assert hindsight.factor("bulk") == 1.0
