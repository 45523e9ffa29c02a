"""The laws of the generated load: rates, burstiness, bounds, and the same bytes for the same seed."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.scenario import ClosedLoop, Lengths, OpenLoop, TrafficClass
from loadtest.workload import (
    END_PROMPT_TOKEN_ID,
    draw_nonces,
    generator,
    plan_closed_loop,
    plan_open_loop,
    sample_arrivals,
    sample_lengths,
    token_prompt,
    word_prompt,
)


def make_class(name: str = "chat", **changes: object) -> TrafficClass:
    fields: dict[str, object] = {
        "name": name,
        "role": "interactive",
        "arrivals": OpenLoop(rate_per_s=50),
        "prompt_tokens": Lengths(min=4, max=40, median=12, sigma=0.8),
        "output_tokens": Lengths(min=1, max=9),
    }
    return TrafficClass.model_validate(fields | changes)


@settings(max_examples=30)
@given(rate=st.floats(0.5, 200), cv=st.floats(0.2, 3), duration=st.floats(0.1, 20), seed=st.integers(0, 2**32))
def test_arrivals_are_in_order_and_inside_the_arm(rate: float, cv: float, duration: float, seed: int) -> None:
    times = sample_arrivals(OpenLoop(rate_per_s=rate, cv=cv), duration, generator(seed))
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < duration))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked(cv: float) -> None:
    rate, duration = 100.0, 400.0
    times = sample_arrivals(OpenLoop(rate_per_s=rate, cv=cv), duration, generator(3))
    gaps = np.diff(times)
    # A renewal process counts rate·t arrivals with variance cv²·rate·t.
    assert abs(len(times) - rate * duration) < 4 * cv * math.sqrt(rate * duration)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_short_arms_have_the_right_rate_too(cv: float) -> None:
    """Without the random start of the first gap, bursty arms of a few seconds would be too busy or too idle."""
    arrivals, runs = OpenLoop(rate_per_s=2, cv=cv), 4000
    counts = [len(sample_arrivals(arrivals, 1.0, generator(seed))) for seed in range(runs)]
    assert np.mean(counts) == pytest.approx(2.0, abs=4 * float(np.std(counts)) / math.sqrt(runs))


@given(low=st.integers(1, 500), spread=st.integers(0, 500), seed=st.integers(0, 2**32), lognormal=st.booleans())
def test_lengths_stay_inside_their_bounds(low: int, spread: int, seed: int, lognormal: bool) -> None:
    lengths = Lengths(min=low, max=low + spread, median=50 if lognormal else None, sigma=1.5)
    drawn = sample_lengths(lengths, 50, generator(seed))
    assert drawn.min() >= low and drawn.max() <= low + spread


def test_lognormal_lengths_have_their_median_and_sigma() -> None:
    drawn = sample_lengths(Lengths(min=1, max=10**6, median=760, sigma=0.99), 20_000, generator(1))
    assert np.median(drawn) == pytest.approx(760, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.99, rel=0.03)


def test_a_bare_number_is_a_fixed_length() -> None:
    assert set(sample_lengths(Lengths.model_validate(32), 20, generator(1)).tolist()) == {32}


def test_the_same_seed_plans_the_same_bytes() -> None:
    def plan(seed: int, round_: int) -> bytes:
        return msgspec.json.encode(plan_open_loop(make_class(), 5.0, seed, round_))

    assert plan(1, 0) == plan(1, 0)
    assert len({plan(1, 0), plan(2, 0), plan(1, 1)}) == 3


def test_classes_draw_independently() -> None:
    first = plan_open_loop(make_class("a"), 5.0, 1, 0)
    second = plan_open_loop(make_class("b"), 5.0, 1, 0)
    assert [p.at_s for p in first] != [p.at_s for p in second]


def test_a_closed_loop_never_ends_and_never_repeats_a_request() -> None:
    plan = plan_closed_loop(make_class(arrivals=ClosedLoop(streams=2)), seed=1, round_=0)
    drawn = [next(plan) for _ in range(600)]
    assert [p.index for p in drawn] == list(range(600))
    assert len({p.prompt_seed for p in drawn}) > 590


def test_a_closed_loop_has_no_arrival_times() -> None:
    with pytest.raises(TypeError, match="closed loop"):
        plan_open_loop(make_class(arrivals=ClosedLoop(streams=2)), 5.0, 1, 0)


def test_prompts_have_their_length_and_small_ids() -> None:
    for planned in plan_open_loop(make_class(), 1.0, 1, 0):
        ids = token_prompt(planned)
        assert len(ids) == planned.prompt_tokens == len(word_prompt(planned).split())
        assert min(ids) > 0 and max(ids) < END_PROMPT_TOKEN_ID
        assert ids == token_prompt(planned)


def test_nonces_differ_from_each_other_and_between_seeds() -> None:
    nonces = draw_nonces(500, seed=1)
    assert len(set(nonces)) == 500
    assert not set(nonces) & set(draw_nonces(500, seed=2))
