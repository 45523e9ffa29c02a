"""ForecastCorrection: the factor finds the bias of predicted waits, up or down, and stays without events."""

import random

import pytest

from scheduler.client.ttft_forecast import (
    MAX_FACTOR,
    SLO_EXCEEDED_SHARE,
    ForecastCorrection,
)


def serve(
    correction: ForecastCorrection,
    ratio: float,
    count: int = 4000,
    spread: float = 0.1,
    exceeded_share: float = SLO_EXCEEDED_SHARE,
) -> list[bool]:
    """Serve `count` requests that wait `ratio` times what was predicted; return which exceeded the corrected wait."""
    rng, late = random.Random(1), []
    for n in range(count):
        actual_s = 0.1 + 0.3 * ratio * rng.uniform(1 - spread, 1 + spread)
        late.append(actual_s > 0.1 + 0.3 * correction.factor("realtime"))
        correction.expect(f"r{n}", "realtime", float(n), own_s=0.1, wait_s=0.3, exceeded_share=exceeded_share)
        correction.first_token(f"r{n}", n + actual_s)
    return late


@pytest.mark.parametrize("ratio", [0.7, 1.0, 2.5])
def test_few_waits_are_longer_than_the_factor_says_once_it_is_learned(ratio: float) -> None:
    correction = ForecastCorrection()
    late = serve(correction, ratio)
    assert correction.factor("realtime") == pytest.approx(ratio * 1.1, rel=0.15)
    assert sum(late[-1000:]) <= 50


@pytest.mark.parametrize(("ratio", "bound"), [(0.01, 1 / MAX_FACTOR), (100.0, MAX_FACTOR)])
def test_the_factor_is_bounded(ratio: float, bound: float) -> None:
    correction = ForecastCorrection()
    serve(correction, ratio)
    assert correction.factor("realtime") == pytest.approx(bound, rel=0.05)


def test_only_first_tokens_of_predicted_requests_move_the_factor() -> None:
    correction = ForecastCorrection()
    correction.first_token("unknown", 5.0)
    correction.expect("gone", "realtime", 0.0, 0.1, 0.1, SLO_EXCEEDED_SHARE)
    correction.forget("gone")
    correction.first_token("gone", 50.0)
    correction.expect("twice", "realtime", 0.0, 0.1, 0.1, SLO_EXCEEDED_SHARE)
    correction.first_token("twice", 0.15)
    once = correction.factor("realtime")
    correction.first_token("twice", 50.0)
    assert correction.factor("realtime") == once < 1.0
    assert correction.factor("bulk") == 1.0
