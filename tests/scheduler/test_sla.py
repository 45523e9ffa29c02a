"""The controller: its budgets for one step, and the moves of its knobs."""

from typing import Any

import pytest

from engine.latency_model import StepCost
from scheduler.batch import Budgets
from scheduler.config import TierSet
from scheduler.sla import AMORTISE, DEBT_MAX_S, MARGIN_MAX, QUIET_SHARE, UPDATE_S, Decision, Load, SLAController
from scheduler.states import RequestState, Status
from scheduler.windows import BUCKET_WIDTH, WINDOW_S
from tests.scheduler.builders import make_decode, make_state, make_tiers

COST = StepCost(step_s=0.01, prefill_token_s=0.0002, decode_s=0.0005)
BULK = ("bulk", "batch")


def budgets(controller: SLAController, states: list[RequestState], now: float = 0.0, cost: StepCost = COST) -> Budgets:
    return controller.budgets(states, cost, now)


def make_load(kv_usage: float = 0.0, held: dict[str, int] | None = None, **waiting: int) -> Load:
    return Load(kv_usage=kv_usage, held=held or {}, waiting=waiting)


def observe(controller: SLAController, kind: str, ms: float, count: int = 100, now: float = 0.0) -> None:
    for _ in range(count):
        controller.observe_latency("realtime", kind, ms / 1000, now)


class Outer:
    """Calls `update` at its pace and keeps the decisions."""

    def __init__(self, tiers: TierSet | None = None, now: float = 0.0) -> None:
        self.controller = SLAController(tiers or make_tiers())
        self.now = now

    def update(self, load: Load, rounds: int = 1) -> list[Decision]:
        decisions = []
        for _ in range(rounds):
            self.now += UPDATE_S
            decisions += self.controller.update(load, self.now)
        return decisions

    def batch_size(self, tier: str) -> int:
        return self.controller.outputs(self.now)[tier].batch_size

    def max_wait_ms(self, tier: str) -> float:
        return self.controller.outputs(self.now)[tier].max_wait_s * 1000


# -- the inner loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Status.WAITING, Status.RUNNING])
def test_bulk_pauses_while_a_first_token_is_awaited_above(status: Status) -> None:
    of = budgets(SLAController(make_tiers()), [make_state("rt", status=status), make_decode("b")]).tiers
    assert {name: b.paused for name, b in of.items()} == {"realtime": False, "bulk": True, "batch": True}


def test_bulk_runs_beside_interactive_decodes_and_alone() -> None:
    controller = SLAController(make_tiers())
    for states in ([make_decode("rt", "realtime"), make_decode("b")], [make_decode("b")], [make_state("b", "bulk")]):
        assert not any(b.paused for b in budgets(controller, states).tiers.values())


def test_alone_a_bulk_step_lasts_as_long_as_an_arrival_may_find_the_engine_busy() -> None:
    fast = StepCost(step_s=0.001)
    alone_s = budgets(SLAController(make_tiers()), [make_decode("b")], cost=fast).tiers["bulk"].step_time_s
    assert alone_s == pytest.approx(QUIET_SHARE * 0.5)


def test_on_a_slow_engine_a_bulk_step_may_last_a_few_times_its_fixed_cost() -> None:
    slow = StepCost(step_s=0.1)
    alone_s = budgets(SLAController(make_tiers()), [make_decode("b")], cost=slow).tiers["bulk"].step_time_s
    assert alone_s == pytest.approx(AMORTISE * 0.1)


def test_beside_decodes_bulk_fills_the_step_until_the_earliest_next_token_is_due() -> None:
    decoding = [make_decode("a", "realtime", last_token_s=0.97), make_decode("b", "realtime", last_token_s=0.92)]
    of = budgets(SLAController(make_tiers()), decoding, now=1.0).tiers
    assert of["bulk"].step_time_s == pytest.approx(0.92 + 0.1 - 1.0)
    assert of["realtime"].step_time_s == pytest.approx(0.1)


def test_without_slack_bulk_gets_no_more_than_an_empty_step() -> None:
    late = make_decode("a", "realtime", last_token_s=0.0)
    assert budgets(SLAController(make_tiers()), [late], now=1.0).tiers["bulk"].step_time_s == COST.step_s


def test_tiers_without_promise_alone_have_no_time_limit() -> None:
    controller = SLAController(make_tiers(realtime={"slo": {}}))
    assert budgets(controller, [make_decode("b")]).tiers["bulk"].step_time_s == float("inf")


def test_misses_widen_the_margin_fast_and_hits_narrow_it_slowly() -> None:
    controller = SLAController(make_tiers())
    observe(controller, "ttft", 600, count=2)
    assert controller.outputs(0.0)["realtime"].margin == pytest.approx(0.1)
    fast = StepCost(step_s=0.001)
    narrower_s = budgets(controller, [make_decode("b")], cost=fast).tiers["bulk"].step_time_s
    assert narrower_s == pytest.approx(QUIET_SHARE * 0.5 * 0.9)
    observe(controller, "ttft", 100, count=100)
    assert controller.outputs(0.0)["realtime"].margin == pytest.approx(0.05)


def test_the_margin_has_bounds_and_does_not_move_without_data() -> None:
    """Trap 8, and anti-windup."""
    controller = SLAController(make_tiers())
    observe(controller, "itl", 500, count=1000)
    assert controller.outputs(0.0)["realtime"].margin == MARGIN_MAX
    for now in range(1, 100):
        controller.update(make_load(), float(now))
    assert controller.outputs(100.0)["realtime"].margin == MARGIN_MAX
    observe(controller, "itl", 10, count=5000, now=100.0)
    assert controller.outputs(100.0)["realtime"].margin == 0.0


# -- the floor -----------------------------------------------------------------------------------------------------


def test_a_starved_tier_is_owed_its_floor_and_is_then_not_paused() -> None:
    """Trap 9."""
    controller = SLAController(make_tiers(bulk={"floor": 0.02}, batch={"floor": 0.0}))
    states = [make_state("rt"), make_decode("b")]
    for _ in range(30):
        controller.observe_step(0.1, {"realtime": 8}, ["realtime", *BULK])
    assert budgets(controller, states).tiers["bulk"].owed
    assert not budgets(controller, states).tiers["bulk"].paused
    assert budgets(controller, states).tiers["batch"].paused, "no floor, no debt"
    controller.observe_step(0.1, {"bulk": 8}, ["realtime", "bulk"])
    assert not budgets(controller, states).tiers["bulk"].owed, "paid"


def test_what_wants_nothing_is_owed_nothing() -> None:
    controller = SLAController(make_tiers(bulk={"floor": 0.1}))
    for _ in range(1000):
        controller.observe_step(0.1, {"realtime": 8}, ["realtime"])
    assert not budgets(controller, [make_state("rt")]).tiers["bulk"].owed


@pytest.mark.parametrize("slo", [{"ttft_p99_ms": 500}, {"ttft_p99_ms": 30_000}, {"itl_p99_ms": 100}])
def test_the_debt_reaches_its_threshold_whatever_the_promise_and_no_burst_follows(slo: dict[str, Any]) -> None:
    controller = SLAController(make_tiers(realtime={"slo": slo}, bulk={"floor": 0.02}))
    states = [make_state("rt"), make_decode("b")]
    for _ in range(10_000):
        controller.observe_step(0.1, {"realtime": 8}, ["realtime", "bulk"])
    assert budgets(controller, states).tiers["bulk"].owed
    controller.observe_step(DEBT_MAX_S, {"bulk": 1}, ["realtime", "bulk"])
    controller.observe_step(0.1, {"bulk": 1}, ["realtime", "bulk"])
    assert not budgets(controller, states).tiers["bulk"].owed, "an hour of flood is paid within a second"


# -- the outer loop: bulk's batch size -----------------------------------------------------------------------------

BULK_WAITS = make_load(held={"bulk": 64}, bulk=100)
MIXED = make_load(held={"bulk": 64, "realtime": 4}, bulk=100)


def test_bulk_grows_step_by_step_up_to_its_bound_while_nobody_is_above() -> None:
    outer = Outer(make_tiers(bulk={"batch_size": {"min": 1, "start": 64, "max": 70}}))
    decisions = [d for d in outer.update(BULK_WAITS, rounds=10) if d.tier == "bulk"]
    assert [(d.knob, d.old, d.new, d.direction) for d in decisions] == [
        ("batch_size", 64, 66, "up"),
        ("batch_size", 66, 68, "up"),
        ("batch_size", 68, 70, "up"),
    ]
    assert {(d.signal, d.reason) for d in decisions} == {("queue", "work waits and nobody above is harmed")}


def test_misses_above_halve_bulk_once_until_the_cut_shows() -> None:
    """Trap 6: no second cut before the first has had its effect."""
    outer = Outer()
    observe(outer.controller, "ttft", 900, now=0.4)
    [decision] = [d for d in outer.update(MIXED, rounds=10) if d.tier == "bulk"]
    assert (decision.old, decision.new, decision.signal) == (64, 32, "slo_misses")
    assert decision.reason == "interactive tiers miss their targets"
    smaller = make_load(held={"bulk": 32, "realtime": 4}, bulk=100)
    assert not outer.update(smaller, rounds=10), "the misses before the cut are answered"
    observe(outer.controller, "ttft", 900, now=outer.now)
    outer.update(smaller)
    assert outer.batch_size("bulk") == 16


def test_bulk_that_holds_nothing_is_not_cut_for_the_misses_of_others() -> None:
    outer = Outer()
    observe(outer.controller, "ttft", 900)
    assert not [d for d in outer.update(make_load(held={"realtime": 80}), rounds=5) if d.tier in BULK]


@pytest.mark.parametrize("samples", [0, 5])
def test_no_data_no_move(samples: int) -> None:
    """Trap 8: with interactive work present, silence is neither good nor bad news."""
    outer = Outer()
    observe(outer.controller, "ttft", 900, count=samples)
    observe(outer.controller, "itl", 900, count=samples)
    waits = make_load(held={"bulk": 64, "realtime": 64}, bulk=100, realtime=9)
    assert outer.update(waits, rounds=20) == []


def test_stale_data_is_no_data() -> None:
    """Trap 8."""
    outer = Outer(now=WINDOW_S + 1)
    observe(outer.controller, "ttft", 900, now=0.0)
    assert outer.update(MIXED, rounds=3) == []


def test_between_the_thresholds_nothing_moves() -> None:
    """The dead band: 1.5 % of misses are neither a reason to cut nor to grow."""
    outer = Outer()
    observe(outer.controller, "ttft", 100, count=197)
    observe(outer.controller, "ttft", 900, count=3)
    assert not [d for d in outer.update(MIXED, rounds=5) if d.tier == "bulk"]


def test_full_kv_cuts_bulk_below_what_it_holds_once() -> None:
    outer = Outer()
    [decision] = outer.update(make_load(kv_usage=0.9, held={"bulk": 20}, bulk=5), rounds=10)
    assert (decision.new, decision.signal, decision.reason) == (16, "kv_usage", "KV blocks run out")
    assert not outer.update(make_load(kv_usage=0.8, held={"bulk": 16}, bulk=5), rounds=5), (
        "hysteresis: not yet up again"
    )
    assert outer.update(make_load(kv_usage=0.5, held={"bulk": 16}, bulk=5))[0].direction == "up"


# -- the outer loop: the interactive knobs -------------------------------------------------------------------------


def test_slow_tokens_shrink_the_interactive_batch_once_per_evidence() -> None:
    """The p99 window remembers 30 s: without this, one slow second would cut the batch to its minimum."""
    outer = Outer()
    observe(outer.controller, "itl", 150, now=0.4)
    [decision] = [d for d in outer.update(make_load(held={"realtime": 64}), rounds=20) if d.tier == "realtime"]
    assert (decision.knob, decision.old, decision.new, decision.signal) == ("batch_size", 64, 51, "itl_p99")
    observe(outer.controller, "itl", 150, now=outer.now)
    outer.update(make_load(held={"realtime": 51}))
    assert outer.batch_size("realtime") == 40


def test_waiting_requests_and_quick_tokens_grow_the_interactive_batch() -> None:
    outer = Outer()
    observe(outer.controller, "itl", 20)
    [decision] = outer.update(make_load(held={"realtime": 68}, realtime=5))
    assert (decision.new, decision.signal) == (66, "queue")


def test_late_first_tokens_shorten_the_wait() -> None:
    outer = Outer(make_tiers(realtime={"max_wait_ms": {"min": 0, "start": 16, "max": 20}}))
    observe(outer.controller, "ttft", 900)
    [decision] = outer.update(make_load(held={"realtime": 1}))
    assert (decision.knob, decision.new, decision.signal) == ("max_wait_ms", 7.5, "ttft_p99")
    outer.update(make_load(held={"realtime": 1}), rounds=10)
    assert outer.max_wait_ms("realtime") == 0


def test_interrupted_decodes_lengthen_the_wait_where_first_tokens_have_room() -> None:
    outer = Outer()
    observe(outer.controller, "itl", 95)
    observe(outer.controller, "ttft", 100)
    decisions = outer.update(make_load(held={"realtime": 1}), rounds=30)
    assert {d.knob for d in decisions} == {"max_wait_ms"}
    assert outer.max_wait_ms("realtime") == 20, "up to its bound"


# -- the outer loop: bulk's max-wait -------------------------------------------------------------------------------


def arrivals(outer: Outer, per_s: float, seconds: float) -> list[Decision]:
    decisions = []
    for _ in range(int(seconds / UPDATE_S)):
        outer.controller.observe_arrivals("bulk", round(per_s * UPDATE_S))
        decisions += outer.update(make_load())
    return decisions


def test_floods_stretch_the_wait_to_what_fills_a_batch_and_quiet_flushes_at_once() -> None:
    tiers = make_tiers(bulk={"max_wait_ms": {"min": 0, "start": 0, "max": 1000}})
    outer = Outer(tiers)
    decisions = arrivals(outer, per_s=100, seconds=60)
    assert outer.max_wait_ms("bulk") == pytest.approx(640, abs=100), "64 at 100 a second, within the dead band"
    assert {(d.signal, d.reason) for d in decisions} == {("arrival_rate", "the time a batch takes to fill")}
    arrivals(outer, per_s=2, seconds=60)
    assert outer.max_wait_ms("bulk") < 100


# -- always --------------------------------------------------------------------------------------------------------


def test_knobs_stay_inside_their_bounds_whatever_comes() -> None:
    outer = Outer()
    tiers = make_tiers()
    for round_ in range(400):
        phase = round_ // 50 % 4
        for kind in ("ttft", "itl"):
            observe(outer.controller, kind, (20, 95, 2000, 300)[phase], count=30, now=outer.now)
        outer.controller.observe_arrivals("bulk", (0, 500, 3, 50)[phase])
        held = {"realtime": 300, "bulk": outer.batch_size("bulk"), "batch": 1}
        for d in outer.update(make_load(kv_usage=(0.1, 0.99, 0.5, 0.8)[phase], held=held, realtime=9, bulk=9)):
            bounds = getattr(tiers[d.tier], d.knob)
            assert bounds.min <= d.new <= bounds.max and d.new != d.old
            assert d.signal and d.reason
            assert d.direction == ("up" if d.new > d.old else "down")


def test_outputs_show_what_was_observed() -> None:
    outer = Outer()
    observe(outer.controller, "ttft", 200)
    outer.controller.observe_end("realtime", met_slo=True, now=0.0)
    outer.controller.observe_end("realtime", met_slo=False, now=0.0)
    shown = outer.controller.outputs(0.0)
    assert shown["realtime"].ttft_p99_s == pytest.approx(0.2, rel=BUCKET_WIDTH)
    assert shown["realtime"].itl_p99_s is None
    assert shown["realtime"].attainment == 0.5
    assert shown["bulk"].attainment is None
    later = outer.controller.outputs(WINDOW_S + 1.0)["realtime"]
    assert (later.ttft_p99_s, later.attainment) == (None, None), "the past is not the present"
