"""The step in flight: which sequences can be evicted from it, and how its time is shared among the tiers."""

from typing import Any

import pytest

from engine.interface import Run, StepEviction, StepPlan, StepResult
from engine.step_time.cost import StepCost
from scheduler.drivers.steps.running_step import RunningStep
from scheduler.holdings.report import Report
from scheduler.planning.step_eviction import BUCKET_S
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_decode, make_state, make_tiers

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.005)
NEWCOMER = make_state("new", "realtime")


def begin(*states: RequestState, protected: tuple[str, ...] = ()) -> RunningStep:
    running = RunningStep(num_layers=30, draw=lambda: 0.5)
    plan = StepPlan(0, run=tuple(Run(s.id, 1) for s in states))
    running.begin(plan, {s.id: s for s in states}, COST, 0.0, protected)
    return running


def result(**more: Any) -> StepResult:
    return StepResult(0, elapsed_s=0.03, **more)


def end(running: RunningStep, of: StepResult) -> Report:
    report = Report()
    running.end(of, report)
    return report


BULK = [make_decode(f"b{i}", "bulk") for i in range(4)]
RT = make_decode("rt", "realtime")


def test_all_bulk_is_evicted_from_a_bulk_only_step_in_the_order_of_the_plan() -> None:
    assert begin(*BULK).evictees(NEWCOMER, StepEviction.STEPS, 0.001) == ["b0", "b1", "b2", "b3"]


@pytest.mark.parametrize(
    ("step_eviction", "evicted"), [(StepEviction.ROWS, 4), (StepEviction.STEPS, 0), (StepEviction.NOTHING, 0)]
)
def test_bulk_is_evicted_from_a_mixed_step_where_the_engine_can_evict_rows(
    step_eviction: StepEviction, evicted: int
) -> None:
    evictees = begin(RT, *BULK).evictees(NEWCOMER, step_eviction, 0.001)
    assert len(evictees) == evicted and "rt" not in evictees


@pytest.mark.trap(1)
@pytest.mark.parametrize(("priority", "evicted"), [(5, 0), (10, 0), (11, 4)], ids=["lower", "equal", "higher"])
def test_no_sequence_is_evicted_for_an_equal_or_lower_tier(priority: int, evicted: int) -> None:
    """Trap 1."""
    tiers = make_tiers(gold={"priority": priority, "slo": {"ttft_p99_ms": 900}})
    assert len(begin(*BULK).evictees(make_state("g", "gold", tiers=tiers), StepEviction.ROWS, 0.001)) == evicted


def test_work_for_a_min_share_is_not_evicted() -> None:
    assert not begin(*BULK, protected=("bulk",)).evictees(NEWCOMER, StepEviction.ROWS, 0.001)


def test_the_fixed_cost_is_charged_to_interactive_tiers() -> None:
    used_s = end(begin(RT, *BULK), result()).used_s
    scale = 0.03 / (0.01 + 5 * 0.005)
    assert used_s == pytest.approx({"realtime": 0.015 * scale, "bulk": 0.02 * scale})
    assert end(begin(*BULK), result()).used_s == pytest.approx({"bulk": 0.03})


def test_time_that_was_thrown_away_is_charged_to_no_tier() -> None:
    running = begin(*BULK)
    running.evictees(NEWCOMER, StepEviction.ROWS, 0.01)
    usage = end(running, result(evicted=tuple(s.id for s in BULK)))
    assert usage.used_s == {} and usage.planned_s == 0, "nor does the step tell how good the prediction was"
    assert end(begin(*BULK), result()).planned_s == pytest.approx(0.03)
    assert running.num_evictions == 1 and running.wasted_s == pytest.approx(0.01)


def test_an_eviction_that_comes_too_late_costs_nothing() -> None:
    late = begin(*BULK)
    assert late.evictees(NEWCOMER, StepEviction.ROWS, 0.01)
    end(late, result())  # it ended before the eviction
    assert late.num_evictions == 0 and late.wasted_s == 0
    late.waste_budget.spend(BUCKET_S)
    assert late.waste_budget.level >= 0.0, "the initial level, and what the step has refilled"


def test_bulk_time_includes_the_fixed_cost_of_steps_without_interactive_work() -> None:
    """A first token that waited for such a step would have come earlier without it."""
    alone, protected, beside = begin(*BULK), begin(*BULK, protected=("bulk",)), begin(RT, *BULK)
    for running in (alone, protected, beside):
        end(running, result())
    assert alone.bulk_total_s == pytest.approx(0.03) == protected.bulk_total_s
    assert beside.bulk_total_s == pytest.approx(0.03 * 0.02 / 0.035), (
        "the fixed cost was charged to the interactive tier"
    )


def test_an_async_step_does_not_replace_the_running_one() -> None:
    running = RunningStep(num_layers=30, draw=lambda: 0.5)
    for step_id, state in enumerate((RT, BULK[0])):
        running.begin(StepPlan(step_id, run=(Run(state.id, 1),)), {state.id: state}, COST, 0.0, ())
    assert list(end(running, result()).used_s) == ["realtime"]
    assert list(end(running, StepResult(1, elapsed_s=0.03)).used_s) == ["bulk"]


def test_engine_time_is_divided_among_the_requests_that_want_a_receipt() -> None:
    wanting = [make_decode(f"w{n}", "bulk", wants_receipt=True) for n in range(2)]
    end(begin(RT, *wanting, *BULK[:2]), result())
    scale = 0.03 / (0.01 + 5 * 0.005)
    assert [state.engine_s for state in wanting] == [pytest.approx(0.005 * scale)] * 2
    assert RT.engine_s == BULK[0].engine_s == 0.0
    alone = make_decode("alone", "bulk", wants_receipt=True)
    end(begin(alone, BULK[0]), result())
    assert alone.engine_s == pytest.approx(0.015), "half of the step, with its fixed cost"


def interactive_s(*states: RequestState, **more: Any) -> float:
    running = begin(*states)
    end(running, result(**more))
    return running.interactive_s


def test_interactive_tiers_take_their_runs_and_the_fixed_cost_of_a_part_of_a_step() -> None:
    full_s, itl_s = 0.03, 0.1
    assert interactive_s(RT, *BULK[:3]) == pytest.approx(0.03 / 0.03 * (0.005 + 0.01 * full_s / itl_s))
    assert interactive_s(*BULK) == 0


def test_a_chat_without_bulk_does_not_take_the_whole_engine() -> None:
    running = begin(RT)
    usage = end(running, StepResult(0, elapsed_s=0.015))
    assert usage.used_s == {"realtime": 0.015}
    assert running.interactive_s == pytest.approx(0.005 + 0.01 * 0.15)
