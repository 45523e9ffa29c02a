"""How many tokens of a prefill fit."""

from hypothesis import given
from hypothesis import strategies as st

from engine.step_time.cost import StepCost
from scheduler.planning.batch import MIN_CHUNK, REST_SHARE, largest_chunk

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=1e-6, context_token_s=1e-6, decode_s=0.002)

QUICK = StepCost(step_s=0.01, prefill_token_s=0.0001, attend_s=1e-8, context_token_s=1e-6, decode_s=0.002)


def test_the_whole_prefill_fits_where_there_is_time() -> None:
    assert largest_chunk(100, 0, 1.0, COST) == 100
    assert largest_chunk(0, 0, 1.0, COST) == 0


def test_nothing_fits_where_the_smallest_chunk_takes_too_long() -> None:
    assert largest_chunk(100, 0, 0.9 * COST.prefill(MIN_CHUNK, 0), COST) == 0
    assert largest_chunk(100, 0, -1.0, COST) == 0


def test_a_short_rest_joins_where_it_costs_little_beside_a_step() -> None:
    """A rest of several milliseconds would make the step's decodes late."""
    assert largest_chunk(60, 0, QUICK.prefill(50, 0), QUICK) == 60, "ten tokens would cost a step of their own"
    assert largest_chunk(90, 0, QUICK.prefill(50, 0), QUICK) == 50
    assert largest_chunk(60, 0, COST.prefill(50, 0), COST) == 50


@given(st.integers(1, 4000), st.integers(0, 4000), st.floats(0.0, 8.0))
def test_a_chunk_is_as_large_as_fits_and_at_most_a_short_rest_larger(wanted: int, context: int, left_s: float) -> None:
    chunk = largest_chunk(wanted, context, left_s, COST)
    assert 0 <= chunk <= wanted
    if chunk > 1:
        assert COST.prefill(chunk, context) <= left_s + REST_SHARE * COST.step_s
    if MIN_CHUNK <= chunk < wanted:
        assert COST.prefill(chunk + 1, context) > left_s
