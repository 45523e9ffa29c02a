"""Async scheduling: when the next step is certain before the running one has ended, and what it holds."""

from engine.interface import Run, StepPlan
from scheduler.drivers.steps.planner import async_plan
from scheduler.request_state import RequestState, Status
from tests.scheduler.builders import make_decode, make_state, make_table, make_tiers, make_view


def plan_after(states: list[RequestState], running: str, **view: int) -> StepPlan | None:
    plan = StepPlan(4, run=tuple(Run(name, 1) for name in running))
    return async_plan(plan, 5, make_view(**view), list(make_table(make_tiers(), states)))


def test_decodes_continue_in_their_order() -> None:
    plan = plan_after([make_decode("a"), make_decode("b")], "ba")
    assert plan == StepPlan(5, run=(Run("b", 1), Run("a", 1)), ahead=True)


def test_a_sequence_that_is_certain_to_end_is_left_out() -> None:
    last = make_decode("a", output=3, max_tokens=4)
    assert plan_after([last, make_decode("b")], "ab") == StepPlan(5, run=(Run("b", 1),), ahead=True)
    assert plan_after([last], "a") is None
    assert plan_after([make_decode("a", prompt=60, output=3)], "a", max_model_len=64) is None


def test_there_is_no_async_plan_beside_anything_but_running_decodes() -> None:
    """`form_batch` decides on newcomers, prefills, preempted sequences and decodes that sat the step out."""
    decode = make_decode("a")
    for other in (
        make_state("b"),
        make_state("b", status=Status.RUNNING, prompt=40, computed=16),
        make_state("b", status=Status.PREEMPTED),
        make_decode("b"),
        make_decode("b", status=Status.PAUSED),
    ):
        assert plan_after([decode, other], "a") is None


def test_blocks_for_both_steps_must_be_free() -> None:
    """Blocks of 16: 31 computed tokens fill the second with the running step and need a third in the next."""
    state = make_decode("a", prompt=31, output=1)
    assert state.num_computed_tokens == 31
    assert plan_after([state], "a", free_blocks=1) is not None
    assert plan_after([state], "a", free_blocks=0) is None
