"""RequestState: its transitions, and what is derived from it."""

import pytest

from engine.interface import blocks_for
from scheduler.request_state import TRANSITIONS, IllegalTransition, Status
from tests.scheduler.builders import make_decode, make_state

ENDS = (Status.FINISHED, Status.FAILED, Status.CANCELLED)


@pytest.mark.parametrize("source", Status)
@pytest.mark.parametrize("target", Status)
def test_only_the_transitions_in_the_table_happen(source: Status, target: Status) -> None:
    """Law 4."""
    state = make_state("r", status=source)
    if target in TRANSITIONS[source]:
        state.move(target)
        assert state.status is target
    else:
        with pytest.raises(IllegalTransition, match=f"r: {source.value} → {target.value}"):
            state.move(target)
        assert state.status is source


def test_the_table_knows_every_status_and_its_ends_are_final() -> None:
    assert set(TRANSITIONS) == set(Status)
    assert not any(TRANSITIONS[end] for end in ENDS)
    assert all(Status.CANCELLED in TRANSITIONS[s] for s in Status if s not in ENDS), "until the end"


def test_kv_is_held_while_running_and_paused_only() -> None:
    for status in Status:
        state = make_state(status=status, prompt=33, computed=33)
        assert state.blocks_held(16) == (blocks_for(33, 16) if status in (Status.RUNNING, Status.PAUSED) else 0)


def test_losing_blocks_to_host_memory_loses_no_work() -> None:
    swapped, evicted = (make_decode(name, prompt=160, shared=7) for name in ("swapped", "evicted"))
    swapped.lose_blocks(Status.SWAPPED)
    evicted.lose_blocks(Status.PREEMPTED)
    assert (swapped.num_uncomputed, evicted.num_uncomputed) == (1, 161)
    for state in (swapped, evicted):
        assert (state.blocks_held(16), state.num_shared_blocks, state.num_preemptions) == (0, 0, 1)


def test_a_decode_is_one_token_behind_its_own_output() -> None:
    assert make_decode("d").is_decode
    assert make_decode("d", status=Status.PAUSED).is_decode
    assert not make_state(status=Status.RUNNING, prompt=33, computed=32).is_decode, "the end of a prefill"
    assert not make_state(status=Status.PREEMPTED, prompt=32, output=4).is_decode, "its KV is gone"


def test_the_slo_needs_the_first_token_in_time_and_allows_one_long_gap_in_a_hundred() -> None:
    state = make_state("r")
    assert not state.met_slo(), "no token is no success"
    for ttft_s, gaps, met in ((0.5, 0, True), (0.501, 0, False), (0.5, 100, True), (0.5, 99, False)):
        state.first_token_s, state.gaps, state.gaps_missed = state.arrived_s + ttft_s, gaps, min(gaps, 1)
        assert state.met_slo() is met


def test_a_run_is_certain_to_end_a_sequence_at_its_last_token_or_at_the_end_of_the_context() -> None:
    last, usual = make_decode("last", prompt=10, output=4, max_tokens=5), make_decode("usual", prompt=10, output=4)
    assert last.ends_with(1, 4096) and not usual.ends_with(1, 4096)
    assert usual.ends_with(1, max_model_len=usual.num_tokens + 1)
    assert not usual.ends_with(1, max_model_len=usual.num_tokens + 2)


def test_a_chunk_that_leaves_tokens_of_the_prompt_uncomputed_ends_nothing() -> None:
    state = make_state("r", prompt=20, max_tokens=1)
    assert state.ends_with(20, 4096) and not state.ends_with(19, 4096)
