"""The controller as a whole: min shares, dry run and pins, new tiers, and what it shows."""

import json
from dataclasses import replace
from typing import Any

import pytest

from scheduler.config import ControllerSwitches
from scheduler.control.budget import ALONE_KV_RESERVE, KV_RESERVE
from scheduler.control.controller import SLAController
from scheduler.control.feedback import Load
from scheduler.control.knobs import TierKnobs
from scheduler.control.windows import UPDATE_S, WINDOW_S
from tests.scheduler.builders import make_decode, make_state, make_tiers
from tests.scheduler.control.builders import BULK, COST, OuterLoop, budgets_of, make_load, observe

BULK_WAITS = make_load(held={"bulk": 64}, bulk=100)


# -- min shares ----------------------------------------------------------------------------------------------------


@pytest.mark.trap(9)
def test_a_starved_tier_is_guaranteed_its_min_share_until_nothing_is_due() -> None:
    """Trap 9."""
    controller = SLAController(make_tiers(bulk={"floor": 0.02}, batch={"floor": 0.0}))
    states = [make_state("rt"), make_decode("b")]
    for _ in range(30):
        controller.observe_step(0.1, 0.1, {"realtime": 0.1}, ["realtime", *BULK], 0.0, 0.0)
    due = budgets_of(controller, states)
    assert due["bulk"].min_share_due and not due["bulk"].kv_reserve
    assert due["batch"].kv_reserve == KV_RESERVE and not due["realtime"].kv_reserve
    controller.observe_step(0.1, 0.1, {"bulk": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
    assert not budgets_of(controller, states)["bulk"].min_share_due, "nothing is due any more"


@pytest.mark.parametrize("slo", [{"ttft_p99_ms": 500}, {"ttft_p99_ms": 30_000}, {"itl_p99_ms": 100}])
def test_what_is_due_reaches_its_threshold_whatever_the_slo_and_no_long_burst_follows(slo: dict[str, Any]) -> None:
    controller = SLAController(make_tiers(realtime={"slo": slo}, bulk={"floor": 0.02}))
    states = [make_state("rt"), make_decode("b")]
    for _ in range(10_000):
        controller.observe_step(0.1, 0.1, {"realtime": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
    burst_s = 0.0
    while budgets_of(controller, states)["bulk"].min_share_due:
        controller.observe_step(0.1, 0.1, {"bulk": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
        burst_s += 0.1
    assert 0 < burst_s < 2, "after a quarter of an hour of flood"


# -- dry run and pins ----------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_would_do_and_does_nothing() -> None:
    dry = make_tiers().model_copy(update={"controller": ControllerSwitches(dry_run=True)})
    outer = OuterLoop(dry)
    decisions = [d for d in outer.update(BULK_WAITS, rounds=3) if d.tier == "bulk"]
    assert len(decisions) == 3 and not any(d.acted for d in decisions)
    assert outer.batch_size("bulk") == 64
    knob = outer.controller.explain(outer.now)["tiers"]["bulk"]["knobs"]["batch_size"]
    assert (knob["value"], knob["chosen"], knob["dry_run"]) == (64, decisions[-1].new, True)


def test_a_pinned_knob_never_moves() -> None:
    outer = OuterLoop(make_tiers(bulk={"pinned": {"batch_size": 7}}))
    assert not [d for d in outer.update(BULK_WAITS, rounds=5) if d.tier == "bulk"]
    assert outer.batch_size("bulk") == 7
    assert outer.controller.explain(outer.now)["tiers"]["bulk"]["knobs"]["batch_size"]["pinned"]


# -- new tiers -----------------------------------------------------------------------------------------------------


def test_a_knob_that_keeps_its_bounds_goes_on_and_one_with_others_begins_anew() -> None:
    outer = OuterLoop()
    outer.update(BULK_WAITS, rounds=10)
    grown = outer.batch_size("bulk")
    assert grown > 64
    outer.controller.reconfigure(make_tiers(gold={"priority": 50}))
    assert outer.batch_size("bulk") == grown
    bounds = {"min": 1, "start": 10, "max": 50}
    outer.controller.reconfigure(make_tiers(bulk={"batch_size": bounds}))
    assert outer.batch_size("bulk") == 10


# -- the margin ----------------------------------------------------------------------------------------------------


def margin_after(controller: SLAController, ratios: list[float], from_s: float) -> float:
    """The margin after steps of 0.1 s that took these multiples of their predicted times."""
    for i, ratio in enumerate(ratios):
        controller.observe_step(0.1 * ratio, 0.1, {}, [], from_s + 0.1 * i, 0.0)
    now = from_s + 0.1 * len(ratios)
    controller.update(make_load(), now)
    return controller.outputs(now)["realtime"].margin


def test_the_margin_keeps_steps_in_time_as_far_as_they_were_predicted_wrongly() -> None:
    controller = SLAController(make_tiers())
    assert margin_after(controller, [1.25] * 100, from_s=0.0) == pytest.approx(1 - 1 / 1.25, abs=0.01)
    assert 0 < margin_after(controller, [0.9] * 400, from_s=10.0) < 0.1, "predictions are never too short any more"


def test_a_disturbance_of_minutes_ago_leaves_no_margin_and_a_great_one_is_not_planned_for() -> None:
    """Shorter steps would not help against step times that are a multiple of what is planned."""
    controller = SLAController(make_tiers())
    disturbed = margin_after(controller, [1.0] * 50 + [5.0] * 50, from_s=0.0)
    assert 0.2 < disturbed < 0.5
    assert margin_after(controller, [1.01] * 10 * 30, from_s=11.0) < 0.1, "30 s later"


def test_a_step_that_did_not_run_as_planned_says_nothing_about_predictions() -> None:
    controller = SLAController(make_tiers())
    before = controller.outputs(0.0)["realtime"].margin
    for _ in range(100):
        controller.observe_step(0.5, 0.0, {}, [], 0.0, 0.0)
    controller.update(make_load(), 0.5)
    assert controller.outputs(0.5)["realtime"].margin == before


# -- what it shows -------------------------------------------------------------------------------------------------


def test_the_explanation_is_plain_data() -> None:
    outer = OuterLoop()
    outer.update(BULK_WAITS, rounds=2)
    for tiers in (make_tiers(), make_tiers(realtime={"slo": {}})):
        outer.controller.reconfigure(tiers)
        explained = json.loads(json.dumps(outer.controller.explain(outer.now), allow_nan=False))
        assert set(explained["tiers"]) == {"realtime", *BULK}
        assert [d["signal"] for d in explained["decisions"]] == ["queue"] * len(explained["decisions"]) != []


def test_an_overload_is_shown_while_it_lasts() -> None:
    controller = SLAController(make_tiers())
    for states, shown in (([make_state("rt", claimed_s=-10.0)], ["realtime"]), ([], [])):
        budgets_of(controller, states)
        assert [name for name, output in controller.outputs(0.0).items() if output.is_overloaded] == shown
        assert controller.explain(0.0)["overloaded"] == shown


def test_prefills_make_a_step_longer_where_all_next_tokens_are_late_in_any_case() -> None:
    """Short steps would only delay first tokens: with 100 decodes, no step is short enough for an ITL of 100 ms."""
    controller, ttft_s = SLAController(make_tiers()), make_tiers()["realtime"].slo.ttft_p99_ms / 1000  # type: ignore[operator]
    cost = replace(COST, step_s=0.01, decode_s=0.002)
    found = []
    for count in (10, 100):
        decodes = [make_decode(f"c{i}", "realtime", last_token_s=0.0) for i in range(count)]
        budget = budgets_of(controller, decodes, cost=cost)["realtime"]
        found.append((budget.limit.extra_s, budget.overloaded))
    assert found == [(0.0, False), (ttft_s, False)], "no first token is late, so prompts need no other order"


def test_outputs_show_what_was_observed() -> None:
    outer = OuterLoop()
    observe(outer.controller, "ttft", 200)
    outer.controller.observe_end("realtime", met_slo=True, now=0.0)
    outer.controller.observe_end("realtime", met_slo=False, now=0.0)
    shown = outer.controller.outputs(0.0)
    assert shown["realtime"].ttft_p99_s == pytest.approx(0.2, rel=0.01)
    assert shown["realtime"].itl_p99_s is None
    assert shown["realtime"].attainment == 0.5
    assert shown["bulk"].attainment is None
    later = outer.controller.outputs(60.0)["realtime"]
    assert (later.ttft_p99_s, later.attainment) == (None, None), "the past is not the present"


def test_each_knob_says_why_it_has_its_value() -> None:
    knobs = TierKnobs(make_tiers(bulk={"pinned": {"batch_tokens": 512}})["bulk"])
    knobs.batch_size.move(knobs.batch_size.value + 1, "queue", "work waits")
    size, tokens, wait = (knob.explain() for knob in knobs)
    assert (size["signal"], size["reason"]) == ("queue", "work waits")
    assert (tokens["signal"], tokens["reason"]) == (None, "pinned in tiers.yaml")
    assert wait["signal"] is None and wait["reason"].startswith("the start value")
    dry = TierKnobs(make_tiers()["bulk"], dry_run=True)
    dry.batch_size.move(1, "slo_misses", "interactive tiers miss their targets")
    assert dry.batch_size.explain()["reason"] == "dry run: interactive tiers miss their targets"


def test_the_usual_time_to_a_first_token_is_the_mean_of_the_first_ones_and_then_follows_the_newest() -> None:
    controller, found = SLAController(make_tiers()), []
    for service_ms, count in ((100, 1), (300, 1), (50, 200)):
        observe(controller, "service", service_ms, count)
        found.append(controller.explain(0.0)["tiers"]["realtime"]["signals"]["first_token_service_s"])
    assert found == pytest.approx([0.1, 0.2, 0.05], rel=0.01)


def test_bulk_leaves_a_smaller_reserve_where_no_interactive_request_was_for_a_while() -> None:
    controller, found = SLAController(make_tiers()), []
    for now, held in ((0.0, 0), (10.0, 1), (20.0, 0), (20.0 + WINDOW_S, 0)):
        if now == 20.0:
            controller.observe_end("realtime", True, now - UPDATE_S)
        controller.update(Load(0.5, {"realtime": held}, {}), now)
        found.append(budgets_of(controller, [])["bulk"].kv_reserve)
    assert found == [ALONE_KV_RESERVE, KV_RESERVE, KV_RESERVE, ALONE_KV_RESERVE]


def test_a_tier_says_how_many_of_its_sequences_a_step_has() -> None:
    controller = SLAController(make_tiers())
    assert controller.explain(0.0)["tiers"]["bulk"]["step_sequences"] is None
    for _ in range(200):
        controller.observe_batch({"bulk": 6, "gone": 1})
    assert controller.explain(0.0)["tiers"]["bulk"]["step_sequences"] == 6
