"""How many tokens of a prefill fit."""

from hypothesis import given
from hypothesis import strategies as st

from engine.step_time.cost import StepCost
from scheduler.planning.batch import MIN_CHUNK, largest_chunk

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=1e-6, context_token_s=1e-6, decode_s=0.002)


def test_the_whole_prefill_fits_where_there_is_time() -> None:
    assert largest_chunk(100, 0, 1.0, COST) == 100
    assert largest_chunk(0, 0, 1.0, COST) == 0


def test_nothing_fits_where_the_smallest_chunk_takes_too_long() -> None:
    assert largest_chunk(100, 0, 0.9 * COST.prefill(MIN_CHUNK, 0), COST) == 0
    assert largest_chunk(100, 0, -1.0, COST) == 0


@given(st.integers(1, 4000), st.integers(0, 4000), st.floats(0.0, 8.0))
def test_a_chunk_is_as_large_as_fits(wanted: int, context: int, left_s: float) -> None:
    chunk = largest_chunk(wanted, context, left_s, COST)
    assert 0 <= chunk <= wanted
    if chunk > 1:
        assert COST.prefill(chunk, context) <= left_s
    if MIN_CHUNK <= chunk < wanted:
        assert COST.prefill(chunk + 1, context) > left_s
