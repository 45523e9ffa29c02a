"""Arrivals: rates, burstiness, and the motions of a rate, against what they are declared to be."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.traffic.scenario_arrivals import Bursts, Drift, OpenLoop, Phase, Spike
from loadtest.traffic.workload import generator
from loadtest.traffic.workload_arrivals import StepFunction, sample_arrivals, sample_rate


def times_of(arrivals: OpenLoop, duration_s: float, seed: int) -> np.ndarray:
    rate = sample_rate(arrivals, duration_s, generator(seed, "rate"))
    return sample_arrivals(rate, arrivals.cv, generator(seed))


MOTIONS = st.fixed_dictionaries(
    {},
    optional={
        "drift": st.just(Drift(sigma=0.3, rho=0.8, every_s=2.0)),
        "bursts": st.just(Bursts(on_s=2, off_s=3, sigma=0.5)),
        "cycle": st.just((Phase(for_s=1.5, factor=0.0), Phase(for_s=0.7, factor=2.0))),
        "spikes": st.just((Spike(at_s=1.0, for_s=2.0, factor=5.0), Spike(at_s=90.0, for_s=1.0, factor=9.0))),
    },
)


@settings(max_examples=60)
@given(
    rate=st.floats(0.5, 200),
    cv=st.floats(0.2, 3),
    duration=st.floats(0.1, 20),
    seed=st.integers(0, 2**32),
    motions=MOTIONS,
)
def test_arrivals_are_in_order_and_inside_the_arm_and_never_in_a_pause(
    rate: float, cv: float, duration: float, seed: int, motions: dict[str, object]
) -> None:
    arrivals = OpenLoop.model_validate({"rate_per_s": rate, "cv": cv, **motions})
    times = times_of(arrivals, duration, seed)
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < duration))
    inside = times[
        np.abs(times[:, None] - sample_rate(arrivals, duration, generator(seed, "rate")).edges).min(1) > 1e-9
    ]
    assert np.all(sample_rate(arrivals, duration, generator(seed, "rate")).at(inside) > 0)


@pytest.mark.parametrize("cv", [0.5, 1.0, 1.05, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked(cv: float) -> None:
    rate, duration = 100.0, 400.0
    times = times_of(OpenLoop(rate_per_s=rate, cv=cv), duration, 3)
    gaps = np.diff(times)
    # A renewal process counts rate·t arrivals with variance cv²·rate·t.
    assert abs(len(times) - rate * duration) < 4 * cv * math.sqrt(rate * duration)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_short_arms_have_the_right_rate_too(cv: float) -> None:
    """Without the random start of the first gap, bursty arms of a few seconds would be too busy or too idle."""
    arrivals, runs = OpenLoop(rate_per_s=2, cv=cv), 4000
    counts = [len(times_of(arrivals, 1.0, seed)) for seed in range(runs)]
    assert np.mean(counts) == pytest.approx(2.0, abs=4 * float(np.std(counts)) / math.sqrt(runs))


def test_a_step_function_is_inverted_across_pauses() -> None:
    pausing = StepFunction(np.array([0.0, 2.0, 5.0, 6.0]), np.array([1.0, 0.0, 4.0]))
    assert pausing.cumulated.tolist() == [0.0, 2.0, 2.0, 6.0]
    assert pausing.inverse(np.array([0.5, 1.5, 2.0, 4.0])).tolist() == [0.5, 1.5, 5.0, 5.5]
    assert pausing.at(np.array([1.0, 3.0, 5.5])).tolist() == [1.0, 0.0, 4.0]


def test_a_drifting_rate_has_its_mean_its_spread_and_its_memory() -> None:
    drift = Drift(sigma=0.18, rho=0.85, every_s=60)
    logs = np.log(sample_rate(OpenLoop(rate_per_s=1, drift=drift), 60.0 * 20_000, generator(1)).values)
    assert np.exp(logs).mean() == pytest.approx(1.0, abs=0.02)
    assert logs.std() == pytest.approx(0.18, rel=0.05)
    assert np.corrcoef(logs[:-1], logs[1:])[0, 1] == pytest.approx(0.85, abs=0.02)


def test_bursts_keep_the_mean_rate_and_have_their_lengths_and_heights() -> None:
    bursts = OpenLoop(rate_per_s=2, bursts=Bursts(on_s=24, off_s=48, sigma=0.9))
    rate = sample_rate(bursts, 72.0 * 20_000, generator(1))
    lengths = np.diff(rate.edges)[1:-1]
    is_on = rate.values[1:-1] > 0
    assert np.all(np.diff(is_on.astype(int)) != 0)
    assert lengths[is_on].mean() == pytest.approx(24, rel=0.03)
    assert lengths[~is_on].mean() == pytest.approx(48, rel=0.03)
    assert lengths[is_on].std() == pytest.approx(24, rel=0.05)  # exponential
    heights = np.log(rate.values[rate.values > 0] / (2 * 3))
    assert heights.mean() == pytest.approx(-0.405, abs=0.03) and heights.std() == pytest.approx(0.9, rel=0.03)
    assert rate.cumulated[-1] / rate.edges[-1] == pytest.approx(2, rel=0.06)


def test_a_motion_that_is_taken_away_leaves_the_others_as_they_were() -> None:
    both = OpenLoop(rate_per_s=1, bursts=Bursts(on_s=2, off_s=2, sigma=1.0), drift=Drift(sigma=0.2, rho=0.5, every_s=5))
    alone = both.model_copy(update={"drift": None})
    rates = [sample_rate(a, 50.0, generator(1)) for a in (both, alone)]
    probes = np.linspace(0, 49.9, 200)
    assert (rates[0].at(probes) > 0).tolist() == (rates[1].at(probes) > 0).tolist()
    assert both.steady() == OpenLoop(rate_per_s=1)


def test_a_rate_that_is_nothing_sends_nothing() -> None:
    assert len(times_of(OpenLoop(rate_per_s=5, cycle=(Phase(for_s=1, factor=0),)), 10.0, 1)) == 0
