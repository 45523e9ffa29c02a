"""The sixteen traps that other systems of this kind fell into: each is bound to the tests that keep us out of it.

A test names its traps itself, in its name (`test_trap_4_…`) or in its docstring ("Trap 4", "Traps 4 and 15"). Here is
which tests must be there, by file and name: whoever renames or removes one has to say what guards the trap instead.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

TRAPS: dict[int, tuple[str, ...]] = {
    # equals evict each other
    1: (
        "scheduler/test_preemption.py::test_a_newcomer_takes_only_from_strictly_lower_tiers",
        "scheduler/test_batch.py::test_two_equals_that_both_must_grow_do_not_evict_each_other_in_turn",
        "scheduler/test_running_step.py::test_nobody_leaves_for_an_equal_or_lower_tier",
    ),
    # evicting for one that cannot start
    2: (
        "scheduler/test_batch.py::test_nobody_is_evicted_for_a_newcomer_that_cannot_start_now",
        "scheduler/test_reaction.py::test_nobody_leaves_for_one_that_could_not_start",
    ),
    # a queue cap that kills preempted work
    3: (
        "scheduler/queue/test_contract.py::test_trap_3_a_queue_limit_spares_what_was_preempted_or_requeued",
        "scheduler/test_core.py::test_a_victim_stays_held_and_loses_its_kv_a_bounded_number_of_times",
    ),
    # admission counted too late
    4: (
        "scheduler/queue/test_contract.py::test_trap_4_of_a_burst_no_more_gets_in_than_may_wait_ahead",
        "scheduler/test_client.py::test_trap_4_a_burst_of_submits_does_not_slip_through",
        "scheduler/test_gate.py::test_trap_4_a_burst_is_counted_before_the_heartbeats_know_of_it",
    ),
    # the wrong victim
    5: (
        "scheduler/test_preemption.py::test_lowest_tier_first_then_the_newest",
        "scheduler/test_preemption.py::test_what_is_nearly_done_is_spared_within_its_tier",
    ),
    # evicting before freed space shows
    6: (
        "scheduler/test_batch.py::test_a_victim_is_not_run_resumed_or_paused_in_the_step_that_takes_its_blocks",
        "scheduler/test_core.py::test_blocks_of_the_cancelled_are_counted_before_anyone_is_evicted",
        "scheduler/test_sla.py::test_misses_above_halve_bulk_once_until_the_cut_shows",
    ),
    # a saturation gate that stops interactive work, too
    7: (
        "gateway/test_admission.py::test_bulk_that_cannot_be_served_stops_no_chat",
        "scheduler/test_core.py::test_a_bulk_tier_at_its_limits_never_stops_interactive_claims",
        "scheduler/test_gate.py::test_trap_7_what_closes_bulk_does_not_close_what_is_above",
    ),
    # a stale signal taken for news
    8: (
        "scheduler/test_sla.py::test_without_data_nothing_moves",
        "scheduler/test_forecast.py::test_trap_8_a_heartbeat_that_stands_still_says_nothing_any_more",
        "scheduler/test_client.py::test_trap_8_heartbeats_that_cease_refuse_nobody",
    ),
    # strict priority that starves bulk
    9: (
        "scheduler/test_sla.py::test_a_starved_tier_is_owed_its_floor_and_is_then_not_paused",
        "scheduler/test_pressing.py::test_a_deadline_is_met_beside_a_flood_where_its_tier_knows_urgency",
    ),
    # a backlog hidden in the engine
    10: (
        "scheduler/test_core.py::test_claims_stay_shallow_and_n_counts_as_n",
        "scheduler/test_loop.py::test_more_than_fits_waits_in_the_store_and_not_in_the_engine",
    ),
    # steering on p99 behind a sharp knee
    11: ("scheduler/test_sla.py::test_old_requests_that_wait_cut_bulk_before_any_p99_says_so",),
    # priorities as bare numbers
    12: (
        "gateway/test_admission.py::test_trap_12_a_number_lifts_nobody_over_what_its_key_may_use",
        "gateway/test_admission.py::test_trap_12_a_keys_entitlement_clamps_demotion_too",
    ),
    # a queue as one value
    13: ("scheduler/queue/test_redis.py::test_trap_13_a_request_is_one_member_of_a_sorted_set",),
    # a resume that loses state
    14: (
        "engine/test_sampling_options.py::test_preemption_changes_nothing_of_what_options_remember",
        "gateway/test_streaming.py::test_a_requeue_in_a_stop_string_loses_neither_its_tail_nor_usage",
    ),
    # n counted as one
    15: (
        "scheduler/queue/test_contract.py::test_trap_15_each_of_n_choices_counts_with_its_tokens",
        "scheduler/test_core.py::test_claims_stay_shallow_and_n_counts_as_n",
        "gateway/test_admission.py::test_trap_15_n_choices_take_n_places_and_n_prompts",
    ),
    # exit code 0 of a dead engine
    16: (
        "tidegate/test_dead_device.py::test_the_worker_exits_with_1_and_the_next_one_does_its_work",
        "scheduler/test_loop.py::test_an_error_in_any_task_ends_all_of_them_and_is_raised",
    ),
}

IN_A_NAME = re.compile(r"^test_trap_(\d+)_")
IN_A_DOCSTRING = re.compile(r"\b[Tt]raps? (\d+)(?: and (\d+))?")


def _tests_of(path: Path) -> Iterator[tuple[str, frozenset[int]]]:
    """The name of each test of a file, and the traps that it names."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            pairs = IN_A_DOCSTRING.findall(ast.get_docstring(node) or "")
            numbers = [*IN_A_NAME.findall(node.name), *(number for pair in pairs for number in pair if number)]
            yield f"{path.relative_to(TESTS).as_posix()}::{node.name}", frozenset(map(int, numbers))


@cache
def traps_by_test() -> dict[str, frozenset[int]]:
    return {name: traps for path in TESTS.rglob("test_*.py") for name, traps in _tests_of(path)}


@pytest.mark.parametrize("number", TRAPS)
def test_a_trap_is_guarded_by_tests_that_name_it(number: int) -> None:
    named = traps_by_test()
    missing = [test for test in TRAPS[number] if test not in named]
    assert not missing, "no such tests"
    assert all(number in named[test] for test in TRAPS[number])


def test_there_are_sixteen_and_no_test_names_another() -> None:
    assert list(TRAPS) == list(range(1, 17))
    assert frozenset().union(*traps_by_test().values()) == set(TRAPS)
