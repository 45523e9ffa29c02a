"""Laxity: the time until a deadline minus the work left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step_time.cost import StepCost
from scheduler.deadlines import is_urgent, laxity_s, work_s

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0001, decode_s=0.002)
tokens = st.integers(0, 5000)


def test_work_is_one_prefill_and_a_step_for_every_further_token() -> None:
    assert work_s(100, 1, COST) == pytest.approx(0.01 + 0.1)
    assert work_s(100, 11, COST) == pytest.approx(0.01 + 0.1 + 10 * (0.01 + 0.002 + 0.0001 * 105))


def test_a_request_that_decodes_has_only_its_other_tokens_left() -> None:
    assert work_s(0, 10, COST, context=200) == pytest.approx(10 * (0.01 + 0.002 + 0.0001 * 205))
    assert work_s(0, 0, COST, context=200) == 0


def test_attention_to_cached_tokens_counts() -> None:
    attending = StepCost(step_s=0.0, prefill_token_s=0.0, attend_s=0.001, context_token_s=0.0, decode_s=0.0)
    assert work_s(10, 1, attending, context=100) == pytest.approx(0.001 * 10 * 105)


def test_laxity_is_how_long_a_request_may_still_wait() -> None:
    assert laxity_s(1.0, 100, 1, COST, 0) == pytest.approx(0.89)
    assert laxity_s(0.05, 100, 1, COST, 0) == pytest.approx(-0.06)


@given(st.floats(-10, 1000), tokens, tokens, tokens)
def test_laxity_never_exceeds_the_time_left_and_shrinks_with_work(
    left_s: float, prefill: int, output: int, context: int
) -> None:
    laxity = laxity_s(left_s, prefill, output, COST, context)
    assert laxity <= left_s
    assert laxity_s(left_s, prefill, output + 2, COST, context) < laxity
    assert laxity_s(left_s, prefill + 1, output + 1, COST, context) <= laxity


def test_urgent_inside_the_horizon_neither_long_before_nor_hopelessly_late() -> None:
    assert not is_urgent(5.0, 5.0)
    assert is_urgent(4.9, 5.0)
    assert is_urgent(-4.9, 5.0), "costs are the 95th percentile: a little late may be on time"
    assert not is_urgent(-5.0, 5.0)


def test_without_a_horizon_nothing_is_urgent() -> None:
    assert not any(is_urgent(laxity, 0.0) for laxity in (-1.0, 0.0, 1.0))
