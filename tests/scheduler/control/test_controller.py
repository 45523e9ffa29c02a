"""The controller as a whole: min shares, dry run and pins, new tiers, and what it shows."""

import json
from typing import Any

import pytest

from scheduler.config import ControllerSwitches
from scheduler.control.controller import SLAController
from tests.scheduler.builders import make_decode, make_state, make_tiers
from tests.scheduler.control.builders import BULK, OuterLoop, budgets_of, make_load, observe

BULK_WAITS = make_load(held={"bulk": 64}, bulk=100)


# -- min shares ----------------------------------------------------------------------------------------------------


@pytest.mark.trap(9)
def test_a_starved_tier_is_guaranteed_its_min_share_and_is_then_not_paused() -> None:
    """Trap 9."""
    controller = SLAController(make_tiers(bulk={"floor": 0.02}, batch={"floor": 0.0}))
    states = [make_state("rt"), make_decode("b")]
    for _ in range(30):
        controller.observe_step(0.1, {"realtime": 0.1}, ["realtime", *BULK], 0.0, 0.0)
    assert budgets_of(controller, states)["bulk"].guaranteed
    assert not budgets_of(controller, states)["bulk"].decodes_only
    assert budgets_of(controller, states)["batch"].decodes_only, "without a min share there is no deficit"
    controller.observe_step(0.1, {"bulk": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
    assert not budgets_of(controller, states)["bulk"].guaranteed, "the deficit is gone"


def test_a_tier_without_work_is_guaranteed_nothing() -> None:
    controller = SLAController(make_tiers(bulk={"floor": 0.1}))
    for _ in range(1000):
        controller.observe_step(0.1, {"realtime": 0.1}, ["realtime"], 0.0, 0.0)
    assert not budgets_of(controller, [make_state("rt")])["bulk"].guaranteed


@pytest.mark.parametrize("slo", [{"ttft_p99_ms": 500}, {"ttft_p99_ms": 30_000}, {"itl_p99_ms": 100}])
def test_the_deficit_reaches_its_threshold_whatever_the_slo_and_no_long_burst_follows(slo: dict[str, Any]) -> None:
    controller = SLAController(make_tiers(realtime={"slo": slo}, bulk={"floor": 0.02}))
    states = [make_state("rt"), make_decode("b")]
    for _ in range(10_000):
        controller.observe_step(0.1, {"realtime": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
    burst_s = 0.0
    while budgets_of(controller, states)["bulk"].guaranteed:
        controller.observe_step(0.1, {"bulk": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
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


# -- what it shows -------------------------------------------------------------------------------------------------


def test_the_explanation_is_plain_data() -> None:
    outer = OuterLoop()
    outer.update(BULK_WAITS, rounds=2)
    for tiers in (make_tiers(), make_tiers(realtime={"slo": {}})):
        outer.controller.reconfigure(tiers)
        explained = json.loads(json.dumps(outer.controller.explain(outer.now), allow_nan=False))
        assert set(explained["tiers"]) == {"realtime", *BULK}
        assert [d["signal"] for d in explained["decisions"]] == ["queue"] * len(explained["decisions"]) != []


def test_outputs_show_what_was_observed() -> None:
    outer = OuterLoop()
    observe(outer.controller, "ttft", 200)
    outer.controller.observe_end("realtime", met_slo=True, gaps=9, now=0.0)
    outer.controller.observe_end("realtime", met_slo=False, gaps=9, now=0.0)
    shown = outer.controller.outputs(0.0)
    assert shown["realtime"].ttft_p99_s == pytest.approx(0.2, rel=0.01)
    assert shown["realtime"].itl_p99_s is None
    assert shown["realtime"].attainment == 0.5
    assert shown["bulk"].attainment is None
    later = outer.controller.outputs(60.0)["realtime"]
    assert (later.ttft_p99_s, later.attainment) == (None, None), "the past is not the present"
