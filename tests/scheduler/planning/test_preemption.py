"""Which sequences are preempted for which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import PreemptionMode
from engine.step_time.cost import StepCost
from scheduler.planning.kv_budget import cheapest_mode, victims
from scheduler.request_state import RequestState
from tests.scheduler.builders import MAX_PREEMPTIONS, make_decode, make_state

TIERS = ("realtime", "bulk", "batch")


def ids(states: list[RequestState]) -> list[str]:
    return [s.id for s in states]


@pytest.mark.trap(5)
def test_victims_are_of_the_lowest_tier_first_then_the_newest() -> None:
    """Trap 5."""
    resident = [
        make_decode("bulk old", "bulk", claimed_s=1),
        make_decode("batch old", "batch", claimed_s=2),
        make_decode("bulk new", "bulk", claimed_s=3),
        make_decode("batch new", "batch", claimed_s=4),
    ]
    order = ["batch new", "batch old", "bulk new", "bulk old"]
    assert ids(victims(make_state("rt"), resident)) == order


@pytest.mark.trap(5)
@pytest.mark.trap(1)
def test_a_newcomer_preempts_only_strictly_lower_tiers() -> None:
    """Trap 1."""
    resident = [make_decode("same", "bulk"), make_decode("above", "realtime"), make_decode("below", "batch")]
    assert ids(victims(make_state("new", "bulk"), resident)) == ["below"]


@pytest.mark.trap(3)
def test_a_sequence_is_preempted_a_bounded_number_of_times() -> None:
    """Trap 3: neither newcomers nor growing sequences preempt it once more."""
    exhausted = make_decode("exhausted", preempted=MAX_PREEMPTIONS)
    assert victims(make_state("rt"), [exhausted]) == []
    assert victims(make_decode("rt", "realtime"), [exhausted]) == []


def test_growth_preempts_newer_equals_and_lower_tiers() -> None:
    needy = make_decode("needy", deadline_ms=5)
    resident = [
        make_decode("older", deadline_ms=4),
        make_decode("newer", deadline_ms=6),
        make_decode("below", "batch", deadline_ms=1),
        make_decode("above", "realtime", deadline_ms=9),
    ]
    assert ids(victims(needy, resident)) == ["below", "newer"]


SEQUENCES = st.builds(
    lambda i, tier, deadline: make_decode(f"s{i}", tier, deadline_ms=deadline),
    st.integers(0, 10**6),
    st.sampled_from(TIERS),
    st.integers(1, 5),
)


@given(SEQUENCES, SEQUENCES)
def test_no_two_sequences_may_preempt_each_other(one: RequestState, other: RequestState) -> None:
    assert not (victims(one, [other]) and victims(other, [one]))


# -- swap or recompute -------------------------------------------------------------------------------------------------

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.001)
SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


def mode(swap_block_s: float, free_swap_blocks: int = 100, shared: int = 0) -> PreemptionMode:
    """Return the mode for a victim that holds 10 blocks of 16 tokens, which take 0.16 s to compute again."""
    victim = make_decode("b", prompt=160, shared=shared)
    return cheapest_mode(victim, 16, COST, swap_block_s, free_swap_blocks)


def test_the_cheaper_mode_is_chosen() -> None:
    assert mode(0.0079) is SWAP, "20 copies of 7.9 ms"
    assert mode(0.0081) is RECOMPUTE


def test_host_memory_must_have_room() -> None:
    assert mode(0.0, free_swap_blocks=10) is SWAP
    assert mode(0.0, free_swap_blocks=9) is RECOMPUTE
    assert mode(0.0, free_swap_blocks=0) is RECOMPUTE


def test_shared_blocks_stay_and_are_not_computed_again() -> None:
    """With two unshared blocks, 12 copies compete with 32 tokens."""
    assert mode(0.0026, shared=8) is SWAP
    assert mode(0.0027, shared=8) is RECOMPUTE
