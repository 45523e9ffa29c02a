"""Which blocks a plan may use, which stay reserved, and which sequences are preempted for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import PreemptionMode
from engine.step_time.cost import StepCost
from scheduler.planning.kv_budget import BlockBudget, cheapest_mode, victims
from scheduler.request_state import RequestState, Status
from tests.scheduler.builders import MAX_PREEMPTIONS, make_decode, make_state, make_view

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.001)
RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP
Preempted = dict[str, PreemptionMode] | None


class Budget:
    def __init__(self, *resident: RequestState, **view: float) -> None:
        self._resident = resident
        self.budget = BlockBudget(make_view(**view), COST, resident, bool(resident))

    def allocate(self, state: RequestState, num_tokens: int) -> Preempted:
        preempted = self.budget.allocate(state, num_tokens, lambda: self._resident)
        return None if preempted is None else {victim.id: mode for victim, mode in preempted}


def half_done(name: str, prompt: int, computed: int, tier: str = "realtime") -> RequestState:
    return make_state(name, tier, Status.RUNNING, prompt=prompt, computed=computed)


def test_a_sequence_starts_only_with_room_for_its_whole_prompt() -> None:
    """Room for the first chunk alone is not enough: half-done prefills would wait for each other's blocks."""
    assert Budget(free_blocks=10).allocate(make_state("r", prompt=160), 16) == {}
    assert Budget(free_blocks=9).allocate(make_state("r", prompt=160), 16) is None


def test_blocks_that_a_half_done_prefill_still_needs_stay_reserved() -> None:
    half = half_done("half", prompt=160, computed=64)
    budget = Budget(half, free_blocks=8)
    assert budget.allocate(make_state("new", prompt=33), 33) is None, "6 of the 8 are reserved"
    assert budget.allocate(make_state("short", prompt=32), 32) == {}
    assert budget.allocate(half, 96) == {}
    assert budget.allocate(make_state("late", prompt=1), 1) is None


def test_a_decode_that_grows_does_not_take_reserved_blocks() -> None:
    half = half_done("half", prompt=160, computed=64)
    decode = make_decode("younger", "realtime", prompt=32)
    assert Budget(half, decode, free_blocks=6).allocate(decode, 1) is None
    assert Budget(half, decode, free_blocks=7).allocate(decode, 1) == {}


@pytest.mark.parametrize(("preempted", "fits"), [(MAX_PREEMPTIONS - 1, True), (MAX_PREEMPTIONS, False)])
@pytest.mark.parametrize("status", [Status.PREEMPTED, Status.SWAPPED])
def test_after_its_last_preemption_a_sequence_needs_room_for_its_longest_end(
    status: Status, preempted: int, fits: bool
) -> None:
    state = make_state("b", "bulk", status, prompt=32, output=1, max_tokens=64, preempted=preempted)
    assert (Budget(free_blocks=5).allocate(state, 33) is not None) is fits
    assert Budget(free_blocks=6).allocate(state, 33) == {}


def test_a_sequence_with_exhausted_preemptions_keeps_its_room_while_others_start_and_grow() -> None:
    exhausted = make_decode("exhausted", prompt=32, max_tokens=64, preempted=MAX_PREEMPTIONS)
    decode = make_decode("d", "realtime", prompt=32)
    budget = Budget(exhausted, decode, free_blocks=5)
    assert budget.allocate(make_state("rt", prompt=32), 32) is None, "4 are reserved"
    assert budget.allocate(decode, 1) == {}
    assert budget.allocate(exhausted, 1) == {}


def test_only_blocks_that_a_victim_does_not_share_count_as_freed() -> None:
    shared = make_decode("b", prompt=160, shared=8)
    assert Budget(shared, free_blocks=1).allocate(make_state("rt", prompt=49), 49) is None
    assert Budget(shared, free_blocks=1).allocate(make_state("rt", prompt=48), 48) == {"b": RECOMPUTE}


def test_each_block_of_host_memory_is_used_once_and_copies_take_time() -> None:
    victims = [make_decode(f"b{i}", prompt=160, claimed_s=i) for i in range(2)]
    budget = Budget(*victims, free_blocks=0, free_swap_blocks=15, swap_block_s=0.001)
    assert budget.allocate(make_state("rt", prompt=320), 320) == {"b1": SWAP, "b0": RECOMPUTE}
    assert budget.budget.swap_s == pytest.approx(0.010)
    back = make_state("s", "bulk", Status.SWAPPED, prompt=64, output=1, computed=64)
    budget = Budget(free_blocks=5, swap_block_s=0.001)
    assert budget.allocate(back, 1) == {}
    assert budget.budget.swap_s == pytest.approx(0.004)


# -- swap or recompute -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("swap_block_s", "free_swap_blocks", "shared", "mode"),
    [
        (0.0079, 100, 0, SWAP),  # 20 copies of 7.9 ms take less than 0.16 s
        (0.0081, 100, 0, RECOMPUTE),
        (0.0, 10, 0, SWAP),
        (0.0, 9, 0, RECOMPUTE),  # host memory must have room
        (0.0, 0, 0, RECOMPUTE),
        (0.0026, 100, 8, SWAP),  # with two unshared blocks, 12 copies compete with 32 tokens
        (0.0027, 100, 8, RECOMPUTE),
    ],
)
def test_the_cheaper_mode_is_chosen(
    swap_block_s: float, free_swap_blocks: int, shared: int, mode: PreemptionMode
) -> None:
    """The victim holds 10 blocks of 16 tokens."""
    victim = make_decode("b", prompt=160, shared=shared)
    assert cheapest_mode(victim, 16, COST, swap_block_s, free_swap_blocks) is mode


# -- who is preempted for whom -----------------------------------------------------------------------------------------

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
