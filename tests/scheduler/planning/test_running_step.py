"""The step in flight: who could leave it, and on whom its time falls."""

from typing import Any

import pytest

from engine.interface import Run, StepEviction, StepPlan, StepResult
from engine.step_time.model import StepCost
from scheduler.planning.running_step import RunningStep
from scheduler.planning.step_eviction import BUCKET_START_S
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_decode, make_state, make_tiers

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.005)
NEWCOMER = make_state("new", "realtime")


def begin(*states: RequestState, protected: tuple[str, ...] = ()) -> RunningStep:
    running = RunningStep()
    plan = StepPlan(0, run=tuple(Run(s.id, 1) for s in states))
    running.begin(plan, {s.id: s for s in states}, COST, 0.0, protected)
    return running


def result(**more: Any) -> StepResult:
    return StepResult(0, elapsed_s=0.03, **more)


BULK = [make_decode(f"b{i}", "bulk") for i in range(4)]
RT = make_decode("rt", "realtime")


def test_all_bulk_leaves_a_bulk_only_step_in_the_order_of_the_plan() -> None:
    assert begin(*BULK).evictees(NEWCOMER, StepEviction.STEPS, 0.001) == ["b0", "b1", "b2", "b3"]


@pytest.mark.parametrize(
    ("step_eviction", "leave"), [(StepEviction.ROWS, 4), (StepEviction.STEPS, 0), (StepEviction.NOTHING, 0)]
)
def test_bulk_leaves_a_mixed_step_where_rows_can(step_eviction: StepEviction, leave: int) -> None:
    evictees = begin(RT, *BULK).evictees(NEWCOMER, step_eviction, 0.001)
    assert len(evictees) == leave and "rt" not in evictees


def test_nobody_leaves_twice_for_one_step() -> None:
    running = begin(*BULK)
    assert running.evictees(NEWCOMER, StepEviction.ROWS, 0.001) and not running.evictees(
        NEWCOMER, StepEviction.ROWS, 0.002
    )


@pytest.mark.trap(1)
@pytest.mark.parametrize(("priority", "leave"), [(5, 0), (10, 0), (11, 4)], ids=["lower", "equal", "higher"])
def test_nobody_leaves_for_an_equal_or_lower_tier(priority: int, leave: int) -> None:
    """Trap 1."""
    tiers = make_tiers(gold={"priority": priority, "slo": {"ttft_p99_ms": 900}})
    assert len(begin(*BULK).evictees(make_state("g", "gold", tiers=tiers), StepEviction.ROWS, 0.001)) == leave


def test_work_whose_floor_is_due_stays() -> None:
    assert not begin(*BULK, protected=("bulk",)).evictees(NEWCOMER, StepEviction.ROWS, 0.001)


def test_nobody_leaves_where_it_does_not_pay() -> None:
    assert not begin(*BULK).evictees(NEWCOMER, StepEviction.ROWS, 0.029)


def test_without_bucket_nobody_leaves() -> None:
    running = begin(*BULK)
    running.waste_budget.take(10.0)
    assert not running.evictees(NEWCOMER, StepEviction.ROWS, 0.01)


def test_the_fixed_cost_falls_on_those_with_a_promise() -> None:
    used_s = begin(RT, *BULK).end(result()).used_s
    scale = 0.03 / (0.01 + 5 * 0.005)
    assert used_s == pytest.approx({"realtime": 0.015 * scale, "bulk": 0.02 * scale})
    assert begin(*BULK).end(result()).used_s == pytest.approx({"bulk": 0.03})


def test_what_was_thrown_away_was_of_use_to_nobody() -> None:
    running = begin(*BULK)
    running.evictees(NEWCOMER, StepEviction.ROWS, 0.01)
    assert running.end(result(evicted=tuple(s.id for s in BULK))).used_s == {}
    assert running.waste_budget.num_evictions == 1 and running.waste_budget.wasted_s == pytest.approx(0.01)


def test_a_wish_that_comes_too_late_costs_nothing() -> None:
    late = begin(*BULK)
    assert late.evictees(NEWCOMER, StepEviction.ROWS, 0.01)
    late.end(result())  # it was over before anybody could leave
    assert late.waste_budget.num_evictions == 0 and late.waste_budget.wasted_s == 0
    late.waste_budget.take(BUCKET_START_S)
    assert late.waste_budget.can_take(0.0), "all that there was at the start, and what the step has earned"


def test_who_stays_in_a_step_that_others_leave_has_had_its_own_part_of_it() -> None:
    running = begin(RT, *BULK)
    assert running.evictees(NEWCOMER, StepEviction.ROWS, 0.01)
    used_s = running.end(StepResult(0, elapsed_s=0.02, evicted=tuple(s.id for s in BULK))).used_s
    assert used_s == pytest.approx({"realtime": 0.015}), "the fixed cost and one decode, as predicted"
    assert running.bulk_total_s == pytest.approx(0.005)


def test_all_that_is_without_a_promise_counts_as_bulk_with_the_fixed_cost_of_its_own_steps() -> None:
    """A first token that waited for such a step would have been in time without it."""
    alone, owed, beside = begin(*BULK), begin(*BULK, protected=("bulk",)), begin(RT, *BULK)
    for running in (alone, owed, beside):
        running.end(result())
    assert alone.bulk_total_s == pytest.approx(0.03) == owed.bulk_total_s
    assert beside.bulk_total_s == pytest.approx(0.03 * 0.02 / 0.035), "there the step was not bulk's"


def test_a_plan_made_ahead_does_not_take_the_place_of_the_step_that_runs() -> None:
    running = RunningStep()
    for step_id, state in enumerate((RT, BULK[0])):
        running.begin(StepPlan(step_id, run=(Run(state.id, 1),)), {state.id: state}, COST, 0.0, ())
    assert list(running.end(result()).used_s) == ["realtime"]
    assert list(running.end(StepResult(1, elapsed_s=0.03)).used_s) == ["bulk"]
