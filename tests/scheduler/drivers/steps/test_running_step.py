"""The step in flight: when it may be suspended, and how its time is shared among the tiers."""

from typing import Any

import pytest

from engine.interface import Run, SequenceOutput, StepEnd, StepPlan, StepResult
from engine.step_time.cost import StepCost
from scheduler.deadlines import deadline_s
from scheduler.drivers.steps.running_step import RunningStep
from scheduler.holdings.report import Report
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


def suspends(running: RunningStep, newcomer: RequestState = NEWCOMER, at_s: float = 0.0) -> bool:
    return running.suspends_for(newcomer, newcomer_s=0.02, now=at_s)


def test_a_step_of_bulk_is_suspended_for_an_interactive_request() -> None:
    assert suspends(begin(*BULK)) and suspends(begin(BULK[0]), at_s=0.014)
    assert not suspends(begin(*BULK, protected=("bulk",))), "it serves a min share"
    assert not suspends(begin(RT)), "it has nothing that may wait"
    assert not suspends(RunningStep(num_layers=30, draw=lambda: 0.5)), "there is no step"


def test_a_step_with_interactive_decodes_is_suspended_where_the_rest_of_its_bulk_takes_longer_than_a_step_costs() -> (
    None
):
    """The fixed cost is 10 ms, and the bulk of the step 20 ms of 35."""
    assert suspends(begin(RT, *BULK), at_s=0.017)
    assert not suspends(begin(RT, *BULK), at_s=0.018)
    assert not suspends(begin(RT, *BULK[:2]))


@pytest.mark.parametrize(("left_s", "expected"), [(0.054, False), (0.056, True)])
def test_it_is_not_suspended_where_a_decode_would_be_late(left_s: float, expected: bool) -> None:
    """The newcomer takes 20 ms, and the step 35."""
    due = make_decode("due", "realtime", last_token_s=left_s - RT.tier.slo.itl_p99_ms / 1000)  # type: ignore[operator]
    assert deadline_s(due) == pytest.approx(left_s)
    assert suspends(begin(due, *BULK)) == expected


@pytest.mark.trap(1)
@pytest.mark.parametrize(("priority", "expected"), [(5, False), (10, False), (11, True)])
def test_no_step_is_suspended_for_an_equal_or_lower_tier(priority: int, expected: bool) -> None:
    """Trap 1."""
    tiers = make_tiers(gold={"priority": priority, "slo": {"ttft_p99_ms": 900}})
    assert suspends(begin(*BULK), make_state("g", "gold", tiers=tiers)) == expected


def test_the_fixed_cost_is_charged_to_interactive_tiers() -> None:
    used_s = end(begin(RT, *BULK), result()).used_s
    scale = 0.03 / (0.01 + 5 * 0.005)
    assert used_s == pytest.approx({"realtime": 0.015 * scale, "bulk": 0.02 * scale})
    assert end(begin(*BULK), result()).used_s == pytest.approx({"bulk": 0.03})


def test_each_part_of_a_suspended_step_is_charged_when_it_ends() -> None:
    running = begin(*BULK)
    first = end(running, result(end=StepEnd.SUSPENDED))
    assert first.used_s == pytest.approx({"bulk": 0.03}), "min shares must know at once"
    assert not first.sequences and running.suspended is not None and not running.is_any
    assert running.num_suspensions == 1 and running.bulk_total_s == pytest.approx(0.03)
    running.begin(StepPlan(1, run=(Run("b0", 1),)), {"b0": BULK[0]}, COST, 0.0, ())
    assert not suspends(running), "one at a time"
    end(running, StepResult(1, elapsed_s=0.01))
    assert running.go_on(1.0) == 0 and running.is_any and running.suspended is None
    last = end(running, result(outputs=tuple(SequenceOutput(s.id, s.num_computed_tokens + 1) for s in BULK)))
    assert last.used_s == pytest.approx({"bulk": 0.03}) and last.elapsed_s == pytest.approx(0.06)
    assert last.planned_s == 0, "a step in parts does not tell how good the prediction was"
    assert last.work is not None and last.work.decodes == 4, "its whole time depends on its work"
    assert running.bulk_total_s == pytest.approx(0.07) and running.wasted_s == 0


def test_a_suspended_step_waits_for_another_one_before_each_part() -> None:
    running = begin(*BULK)
    for _ in range(2):
        end(running, StepResult(0, elapsed_s=0.01, end=StepEnd.SUSPENDED))
        assert running.suspended is not None and running.suspended.num_beside == 0
        running.suspended.num_beside = 1
        running.go_on(1.0)


def test_the_parts_of_a_step_delay_as_much_as_the_whole_step() -> None:
    """Each part at its end, by the share of those that may wait, and with the time of the host."""
    tiers = make_tiers(realtime={"max_slowdown": 2.0})
    beside, delays_s = make_decode("beside", "realtime", tiers=tiers), list[float]()
    for parts_s in ((0.03,), (0.01, 0.02)):
        running = begin(RT, *BULK)
        running.open_account(beside)
        running.accounts.open(beside, 0.0, 0.0)
        for part_s in parts_s[:-1]:
            running.end(StepResult(0, elapsed_s=part_s, end=StepEnd.SUSPENDED), Report(), overhead_s=0.002)
            running.go_on(1.0)
        outputs = tuple(SequenceOutput(s.id, s.num_computed_tokens + 1) for s in (RT, *BULK))
        running.end(StepResult(0, elapsed_s=parts_s[-1], outputs=outputs), Report())
        delays_s.append(running.accounts.left_s([beside]))
    assert delays_s[1] == pytest.approx(delays_s[0] - 0.002)


def test_a_step_in_parts_teaches_nothing_of_steps_without_bulk() -> None:
    """Its sequences yielded when it was suspended. Then the other key's requests ended, and none yields."""
    flood = [make_decode(f"f{i}", "realtime") for i in range(4)]
    for state in flood:
        state.yields = True
    running = begin(*flood)
    end(running, StepResult(0, elapsed_s=0.02, end=StepEnd.SUSPENDED))
    for state in flood:
        state.yields = False
    running.go_on(1.0)
    before = running.accounts.step_time.num_observed
    outputs = tuple(SequenceOutput(s.id, s.num_computed_tokens + 1) for s in flood)
    end(running, StepResult(0, elapsed_s=0.001, outputs=outputs))
    assert running.accounts.step_time.num_observed == before


def test_dropping_a_step_takes_no_time() -> None:
    running = begin(*BULK)
    end(running, result(end=StepEnd.SUSPENDED))
    running.go_on(1.0)
    dropped = end(running, StepResult(0, end=StepEnd.DROPPED))
    assert not any(dropped.used_s.values()) and dropped.planned_s == 0 and dropped.work is None
    assert running.wasted_s == pytest.approx(0.03) and not running.is_any


def test_an_arrival_has_missed_what_is_done_of_the_part_that_runs() -> None:
    """The parts before have ended, so its account counts from their end."""
    running = begin(*BULK)
    end(running, StepResult(0, elapsed_s=0.01, end=StepEnd.SUSPENDED))
    running.go_on(NEWCOMER.arrived_s - 0.002)
    arrived = make_state("late", "realtime")
    running.open_account(arrived)
    assert arrived.delay_seen_s == pytest.approx(0.01 + 0.002)


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
