"""The limits of a step: bulk takes what interactive requests hardly notice."""

from dataclasses import replace

import pytest

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import ControllerSwitches
from scheduler.control.budget import TierBudget
from scheduler.control.controller import SLAController
from scheduler.control.step_limit import (
    InteractiveTraffic,
    InteractiveWork,
    StepLimit,
    beside_min_shares_s,
    step_limits,
)
from scheduler.request_state import RequestState
from tests.scheduler.builders import make_decode, make_state, make_tiers
from tests.scheduler.control.builders import COST, QUICK, budgets_of, observe


def limit_s(
    controller: SLAController,
    states: list[RequestState] | None = None,
    cost: StepCost = QUICK,
    now: float = 0.0,
    tier: str = "bulk",
) -> float:
    """The limit of a tier's budget, beside interactive `states`. Without them, it is all that bulk adds."""
    budget = budgets_of(controller, states or [], now, cost)[tier]
    return budget.limit.base_s if states else budget.beside(0.0).limit.base_s


LEFT_S = (-1.0, 0.0, 0.001, 1.0, NEVER_S)


def quick_controller() -> SLAController:
    return SLAController(make_tiers(), suspends_steps=True)


# -- what depends on the step so far -------------------------------------------------------------------------------


def test_the_extra_share_adds_to_a_long_step() -> None:
    limit = StepLimit(0.1, extra_share=0.5, extra_s=0.01)
    assert [limit.total_s(planned_s) for planned_s in (0.01, 0.2, 0.3)] == pytest.approx([0.1, 0.31, 0.46])


def test_prefills_make_a_step_so_long_that_its_guaranteed_work_is_its_share() -> None:
    cost = StepCost(step_s=0.01)
    assert beside_min_shares_s(0.02, 0.1, cost) == pytest.approx(0.2)
    assert beside_min_shares_s(0.0, 0.0, cost) == NEVER_S, "no guaranteed work"


def test_guaranteed_work_of_one_sequence_makes_no_step_short() -> None:
    cost = StepCost(step_s=0.01)
    assert beside_min_shares_s(0.0001, 0.1, cost) == beside_min_shares_s(0.01, 0.1, cost)


@pytest.mark.parametrize(("due_s", "limit_s"), [(0.005, 0.02), (0.03, 0.04), (1.0, 0.074)])
def test_all_that_is_due_is_done_in_one_step_if_tokens_are_in_time_then(due_s: float, limit_s: float) -> None:
    """100 ms are left, without the margin and the host's time; a step without work takes 10 ms."""
    chat = make_decode("rt", "realtime", last_token_s=0.0)
    work = InteractiveWork.of([chat], StepCost(step_s=0.01))
    limits = step_limits(InteractiveTraffic(0.5, NEVER_S, 0.5, 0.25, 0.001), work, StepCost(step_s=0.01), 0.0, 0.0)
    assert limits.of_due(due_s, StepCost(step_s=0.01)).base_s == pytest.approx(limit_s)


def test_all_that_is_due_is_done_in_one_step_if_tokens_are_late_in_any_case() -> None:
    slow = StepCost(step_s=0.2)
    work = InteractiveWork.of([make_decode("rt", "realtime", last_token_s=0.0)], slow)
    limits = step_limits(InteractiveTraffic(0.5, NEVER_S, 0.5, 0.25, 0.001), work, slow, 0.0, 0.0)
    assert limits.of_due(0.7, slow).base_s == pytest.approx(0.9)


@pytest.mark.parametrize("tier", ["bulk", "batch"])
def test_guaranteed_work_has_time_for_a_step_even_if_noise_hides_its_fixed_cost(tier: str) -> None:
    controller = SLAController(make_tiers(bulk={"floor": 0.1}, batch={"floor": 0.1}))
    controller.observe_step(1.0, 0.0, {}, ["bulk", "batch"], 0.0, 0.0)
    budget = budgets_of(controller, [], 0.0, StepCost(step_s=0.0, decode_s=0.0, min_step_s=0.01))[tier]
    assert budget.min_share_due and budget.limit.base_s >= 0.01


# -- beside interactive requests -----------------------------------------------------------------------------------


@pytest.mark.trap(11)
def test_beside_decodes_the_step_ends_before_the_earliest_next_token_is_due() -> None:
    """0.1 s after the last token, and not much earlier."""
    decoding = [make_decode("a", "realtime", last_token_s=0.97), make_decode("b", "realtime", last_token_s=0.918)]
    controller = SLAController(make_tiers())
    for tier in ("realtime", "bulk"):
        assert 0.012 < limit_s(controller, decoding, COST, now=1.0, tier=tier) < 0.018


def test_bulk_adds_what_the_delay_accounts_have_left_and_an_arrival_does_not_notice() -> None:
    decoding = [make_decode("a", "realtime", last_token_s=1.0)]
    budgets = [budgets_of(quick_controller(), decoding, 1.0, QUICK, left_s)["bulk"] for left_s in LEFT_S]
    added = [replace(bulk, limit=StepLimit()).beside(0.01).limit.base_s - 0.01 for bulk in budgets]
    whole_s = limit_s(SLAController(make_tiers(), suspends_steps=False))
    assert added == pytest.approx([0.0, 0.0, 0.001, whole_s, whole_s]), "at most as bulk alone in a step that runs on"


def test_the_interactive_part_of_a_step_and_what_bulk_adds_stay_inside_the_hard_limit() -> None:
    bulk = TierBudget(64, limit=StepLimit(0.1), added_s=0.03, alone_s=0.06)
    assert [bulk.beside(interactive_s).limit.base_s for interactive_s in (0.0, 0.05, 0.08)] == [0.06, 0.08, 0.1]


def test_a_decode_that_is_longer_than_a_step_of_bulk_alone_runs_by_itself() -> None:
    bulk = TierBudget(64, added_s=0.03, beside_s=0.01)
    limits_s = [bulk.beside(0.05, decode_s).limit.base_s for decode_s in (0.005, 0.02, 0.04)]
    assert limits_s == pytest.approx([0.06, 0.07, 0.08])


def test_urgent_bulk_may_use_all_that_the_slo_leaves() -> None:
    """The more urgent, the more; a deadline does not make an interactive token late."""
    controller, found = quick_controller(), []
    decoding = [make_decode("a", "realtime", last_token_s=1.0)]
    for urgency in (0.0, 0.5, 1.0):
        controller.set_urgency("bulk", urgency)
        of = budgets_of(controller, decoding, 1.0, QUICK, left_s=-1.0)
        found.append(of["bulk"].added_s)
    assert 0.0 == found[0] < found[1] < found[2] == limit_s(SLAController(make_tiers(), suspends_steps=False))
    assert of["batch"].added_s == 0.0, "it is the other tier's deadline"
    assert of["bulk"].limit.base_s == of["realtime"].limit.base_s


# -- what cannot be in time ----------------------------------------------------------------------------------------


def interactive_budget(states: list[RequestState], now: float = 0.0, **realtime: object) -> TierBudget:
    return budgets_of(SLAController(make_tiers(realtime=realtime)), states, now)["realtime"]


def test_a_tier_that_is_far_behind_serves_prompts_in_order_and_in_longer_steps() -> None:
    few, many = ([make_state(f"rt{i}", prompt=100) for i in range(n)] for n in (3, 200))
    assert not interactive_budget(few).overloaded
    behind = interactive_budget(many)
    assert behind.overloaded
    assert behind.limit.total_s(0.05) > 0.5 > interactive_budget(few).limit.total_s(0.05), "the TTFT SLO is 0.5 s"


def test_decodes_slow_prefills_down_and_so_the_tier_is_behind_sooner() -> None:
    waiting = [make_state(f"rt{i}", prompt=100) for i in range(30)]
    decoding = [make_decode(f"d{i}", "realtime", last_token_s=0.0) for i in range(150)]
    assert not interactive_budget(waiting).overloaded
    assert interactive_budget([*waiting, *decoding]).overloaded


def test_a_tier_is_not_helped_at_the_cost_of_a_higher_one() -> None:
    tiers = make_tiers(gold={"priority": 200, "slo": {"itl_p99_ms": 100}})
    waiting = [make_state(f"rt{i}", prompt=100) for i in range(200)]
    above = make_decode("gold", "gold", tiers=tiers, last_token_s=0.0)
    assert not budgets_of(SLAController(tiers), [*waiting, above])["realtime"].overloaded


def test_the_batch_size_does_not_hold_back_late_first_tokens_unless_it_is_pinned() -> None:
    waiting = [make_state("rt")]
    assert [interactive_budget(waiting, now).max_num_seqs for now in (0.1, 0.6)] == [64, 256]
    assert interactive_budget(waiting, 0.6, pinned={"batch_size": 8}).max_num_seqs == 8


def test_a_deadline_that_cannot_be_met_any_more_is_no_limit() -> None:
    """Neither the gap of a token that is late, nor the pace of an answer that is far behind."""
    tiers = make_tiers(realtime={"slo": {"ttft_p99_ms": 500, "itl_p99_ms": 100, "tpot_ms": 40}})
    in_time = make_decode("b", "realtime", tiers=tiers, last_token_s=10.0)
    in_time.arrived_s = 10.0
    for last_token_s in (9.0, 10.0):
        late = make_decode("a", "realtime", tiers=tiers, last_token_s=last_token_s)
        late.arrived_s = 0.0
        assert 0.06 < limit_s(SLAController(tiers), [late, in_time], COST, now=10.0) < 0.1


def test_where_decodes_alone_take_too_long_nothing_is_added_for_deadlines() -> None:
    decoding = [make_decode(f"d{i}", "realtime", last_token_s=0.0) for i in range(300)]
    assert limit_s(SLAController(make_tiers()), decoding, COST) == 0.0


@pytest.mark.parametrize(
    ("prompts_ms", "limit_ms"),
    [
        ([], 15),
        ([25], 15),  # in time, alone
        ([100, 90], 100),  # no prompt is in time, and the shortest one fits into a step
        ([25, *[100] * 6], 15),  # long prompts beside short ones leave the target in force
        ([100] * 6 + [25], 15),
        ([25, *[100] * 100], 110),
    ],
)
def test_a_first_token_that_is_late_even_alone_shortens_no_step(prompts_ms: list[float], limit_ms: float) -> None:
    """A quarter of the target of 60 ms, so that an arrival is in time; a step takes 10 ms at least."""
    controller = SLAController(make_tiers(realtime={"slo": {"ttft_p99_ms": 60}}))
    for prompt_ms in prompts_ms:
        observe(controller, "service", 200.0, count=1, own_ms=prompt_ms)
    limit = budgets_of(controller, [make_state("rt")])["realtime"].limit
    assert limit.base_s == pytest.approx(limit_ms / 1000, rel=0.01)


@pytest.mark.parametrize(("prompt_ms", "extra_ms"), [(30, 40), (100, 110)])
def test_in_an_overload_prefills_add_a_whole_short_prompt(prompt_ms: float, extra_ms: float) -> None:
    tiers = make_tiers(realtime={"slo": {"ttft_p99_ms": 40, "itl_p99_ms": 5}})
    controller = SLAController(tiers)
    observe(controller, "service", 200.0, count=1, own_ms=prompt_ms)
    decoding = make_decode("d", "realtime", tiers=tiers, last_token_s=0.0)
    extra_s = budgets_of(controller, [decoding])["realtime"].limit.extra_s
    assert extra_s == pytest.approx(extra_ms / 1000), "its next token is late in any case"


# -- bulk alone ----------------------------------------------------------------------------------------------------


def test_alone_a_bulk_step_is_as_long_as_an_arrival_does_not_notice() -> None:
    """Longer where an arrival suspends the step, and where first tokens take long anyway."""
    alone_s = []
    for service_s in (0.05, 0.1):
        for suspends in (False, True):
            controller = SLAController(make_tiers(realtime={"max_slowdown": 1.25}), suspends_steps=suspends)
            observe(controller, "service", 1000 * service_s, count=200)
            alone_s.append(limit_s(controller))
    whole, suspended, slower, _ = alone_s
    assert whole < suspended and whole < slower
    work_s = whole - QUICK.step_s
    assert work_s / 2 == pytest.approx(0.25 * 0.05, rel=0.05), "the mean wait, of the usual time to a first token"


def test_half_of_a_bulk_step_is_work_however_little_it_may_delay() -> None:
    controller = SLAController(make_tiers(realtime={"max_slowdown": 1.0}))
    assert limit_s(controller, cost=COST) == pytest.approx(0.25 * 0.5), "before the first chat, only its SLO counts"
    observe(controller, "service", 100.0, count=1)
    assert limit_s(controller, cost=COST) == 2 * COST.step_s


def test_tiers_without_an_slo_alone_have_no_limit() -> None:
    assert limit_s(SLAController(make_tiers(realtime={"slo": {}})), cost=COST) == NEVER_S


def test_without_feed_forward_tiers_are_strict_priorities_with_fixed_budgets() -> None:
    strict = make_tiers().model_copy(update={"controller": ControllerSwitches(feed_forward=False)})
    of = budgets_of(SLAController(strict), [make_state("rt"), make_decode("b")])
    assert not any(b.min_share_due for b in of.values())
    assert {b.limit.base_s for b in of.values()} == {NEVER_S}
