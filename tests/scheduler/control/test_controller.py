"""The controller: its budgets for one step, and the moves of its knobs."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.interface import StepEviction
from engine.step_time.model import StepCost
from scheduler.config import ControllerSwitches, TierSet
from scheduler.control.budget import Budgets
from scheduler.control.controller import SLAController
from scheduler.control.feedback import UPDATE_S, Load
from scheduler.control.knobs import Decision
from scheduler.control.min_share import MAX_DEFICIT_S
from scheduler.control.step_limit import AMORTISE, DELAY_SHARE, MAX_DECODE_SLOWDOWN
from scheduler.control.tier_stats import MARGIN_STEP, MAX_MARGIN
from scheduler.control.windows import BUCKET_WIDTH, MIN_SAMPLES, WINDOW_S
from scheduler.request_state import RequestState, Status
from tests.scheduler.builders import make_decode, make_state, make_tiers

COST = StepCost(step_s=0.01, prefill_token_s=0.0002, decode_s=0.0005)
BULK = ("bulk", "batch")


def budgets(controller: SLAController, states: list[RequestState], now: float = 0.0, cost: StepCost = COST) -> Budgets:
    return controller.budgets([s for s in states if s.tier.is_interactive], cost, now)


def make_load(kv_usage: float = 0.0, held: dict[str, int] | None = None, **waiting: int) -> Load:
    return Load(kv_usage=kv_usage, held=held or {}, waiting=waiting)


def observe(
    controller: SLAController, kind: str, ms: float, count: int = 100, now: float = 0.0, bulk_ms: float = 0.0
) -> None:
    for _ in range(count):
        controller.observe_latency("realtime", kind, ms / 1000, now, bulk_ms / 1000)


def ttft_margin(controller: SLAController) -> float:
    margins = controller.explain(0.0)["tiers"]["realtime"]["signals"]["margins"]
    assert isinstance(margins, dict)
    return float(margins["ttft"])


def with_bulk(controller: SLAController, now: float = 0.0) -> None:
    """Bulk has just used the engine: misses are its fault, too."""
    controller.observe_step(0.1, {"bulk": 0.1}, [], now, 0.0)


class Outer:
    """Calls `update` at its pace and keeps the decisions."""

    def __init__(self, tiers: TierSet | None = None, now: float = 0.0) -> None:
        self.controller = SLAController(tiers or make_tiers())
        self.now = now

    def update(self, load: Load, rounds: int = 1) -> list[Decision]:
        """But for those on `batch_tokens`, which follow the slots: `update_all` has them, too."""
        return [d for d in self.update_all(load, rounds) if d.knob != "batch_tokens"]

    def update_all(self, load: Load, rounds: int = 1) -> list[Decision]:
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
    assert {name: b.decodes_only for name, b in of.items()} == {"realtime": False, "bulk": True, "batch": True}


def test_bulk_runs_beside_interactive_decodes_and_alone() -> None:
    controller = SLAController(make_tiers())
    for states in ([make_decode("rt", "realtime"), make_decode("b")], [make_decode("b")], [make_state("b", "bulk")]):
        assert not any(b.decodes_only for b in budgets(controller, states).tiers.values())


@pytest.mark.parametrize(
    ("step_eviction", "share"), [(StepEviction.NOTHING, 0.5), (StepEviction.STEPS, 0.25), (StepEviction.ROWS, 1 / 16)]
)
def test_alone_a_bulk_step_is_as_long_as_an_arrival_does_not_notice(step_eviction: StepEviction, share: float) -> None:
    """A small share of the usual service of a first token, on average: longer where bulk can leave the step."""
    fast, controller = StepCost(step_s=0.0001), SLAController(make_tiers(), step_eviction)
    for _ in range(200):
        controller.observe_latency("realtime", "service", 0.05, 0.0)
    alone_s = budgets(controller, [make_decode("b")], cost=fast).tiers["bulk"].limit.limit_s
    assert alone_s == pytest.approx(DELAY_SHARE * 0.05 / share)


def test_frequent_arrivals_that_bulk_leaves_for_shorten_its_steps() -> None:
    fast, controller = StepCost(step_s=0.0001), SLAController(make_tiers(), StepEviction.ROWS)
    step_s = []
    for per_update in (1, 20):
        for round_ in range(100):
            controller.observe_arrivals("realtime", per_update)
            controller.update(make_load(), per_update * 1000 + round_ * UPDATE_S)
        step_s.append(budgets(controller, [make_decode("b")], cost=fast).tiers["bulk"].limit.limit_s)
    assert step_s[0] > 5 * step_s[1]


def test_on_a_slow_engine_a_bulk_step_may_last_a_few_times_its_fixed_cost() -> None:
    slow = StepCost(step_s=0.1)
    alone_s = budgets(SLAController(make_tiers()), [make_decode("b")], cost=slow).tiers["bulk"].limit.limit_s
    assert alone_s == pytest.approx(AMORTISE * 0.1)


def test_beside_decodes_bulk_fills_the_step_until_the_earliest_next_token_is_due() -> None:
    decoding = [make_decode("a", "realtime", last_token_s=0.97), make_decode("b", "realtime", last_token_s=0.912)]
    of = budgets(SLAController(make_tiers()), decoding, now=1.0).tiers
    assert of["bulk"].limit.limit_s == pytest.approx(0.85 * (0.912 + 0.1 - 1.0))
    assert of["realtime"].limit.limit_s == pytest.approx(0.85 * (0.912 + 0.1 - 1.0)), "less the margin"


def test_beside_decodes_bulk_does_not_stretch_steps_to_the_whole_gap_promised() -> None:
    decoding, quick = [make_decode("a", "realtime", last_token_s=1.0)], StepCost(step_s=0.001)
    controller = SLAController(make_tiers(), StepEviction.ROWS)
    of = budgets(controller, decoding, now=1.0, cost=quick).tiers
    assert of["bulk"].limit.limit_s == pytest.approx(MAX_DECODE_SLOWDOWN * (quick.step_s + quick.decode(32)))
    slow = StepCost(step_s=0.05)
    assert budgets(controller, decoding, now=1.0, cost=slow).tiers["bulk"].limit.limit_s <= slow.step_s + 0.001


def test_without_slack_bulk_gets_no_more_than_an_empty_step() -> None:
    late = make_decode("a", "realtime", last_token_s=0.0)
    assert budgets(SLAController(make_tiers()), [late], now=1.0).tiers["bulk"].limit.limit_s == COST.step_s


def test_tiers_without_promise_alone_have_no_time_limit() -> None:
    controller = SLAController(make_tiers(realtime={"slo": {}}))
    assert budgets(controller, [make_decode("b")]).tiers["bulk"].limit.limit_s == float("inf")


def test_misses_widen_the_margin_fast_and_hits_narrow_it_slowly() -> None:
    controller = SLAController(make_tiers(realtime={"slo": {"ttft_p99_ms": 500}}))
    fast = StepCost(step_s=0.0001)
    wide_s = budgets(controller, [make_decode("b")], cost=fast).tiers["bulk"].limit.limit_s
    observe(controller, "ttft", 600, count=2, bulk_ms=200)
    assert budgets(controller, [make_decode("b")], cost=fast).tiers["bulk"].limit.limit_s == pytest.approx(0.9 * wide_s)
    assert ttft_margin(controller) == pytest.approx(0.1)
    observe(controller, "ttft", 100, count=100)
    assert ttft_margin(controller) == pytest.approx(0.05)


@pytest.mark.parametrize(("gaps", "hits"), [(5, 1000), (40, 8000), (1000, 20_000)])
def test_of_gaps_as_many_may_miss_as_lets_one_request_in_a_hundred_break_a_promise(gaps: int, hits: int) -> None:
    """One long gap is forgotten after as many short ones as two hundred requests have: there are two promises to keep.
    Of a thousand gaps, ten may be long."""
    controller = SLAController(make_tiers())
    for _ in range(500):
        controller.observe_end("realtime", met_slo=True, gaps=gaps, now=0.0)
    observe(controller, "itl", 20, count=4 * hits)  # whatever it starts with
    assert controller.outputs(0.0)["realtime"].margin == 0.0
    observe(controller, "itl", 150, count=1)
    observe(controller, "itl", 20, count=int(0.9 * hits))
    assert controller.outputs(0.0)["realtime"].margin == pytest.approx(0.1 * MARGIN_STEP, rel=0.05)
    observe(controller, "itl", 20, count=int(0.11 * hits))
    assert controller.outputs(0.0)["realtime"].margin == 0.0


def test_one_quick_first_token_does_not_shorten_bulks_steps_as_if_all_were() -> None:
    """The first weighs as much as the guess from the promise; of many, the guess is forgotten."""
    controller, guess_s, quick_s = SLAController(make_tiers(), StepEviction.STEPS), 0.05, 0.01
    bulk_step_s = []
    for count in (0, 1, 200):
        for _ in range(count):
            controller.observe_latency("realtime", "service", quick_s, 0.0)
        bulk_step_s.append(budgets(controller, [], cost=StepCost(step_s=0.0001)).tiers["bulk"].limit.limit_s)
    seconds = [guess_s, (guess_s + quick_s) / 2, quick_s]
    assert bulk_step_s == pytest.approx([DELAY_SHARE * s / 0.25 for s in seconds], rel=0.01)


@pytest.mark.trap(8)
def test_the_margin_has_bounds_and_does_not_move_without_data() -> None:
    """Trap 8, and anti-windup."""
    controller = SLAController(make_tiers())
    observe(controller, "itl", 500, count=1000)
    assert controller.outputs(0.0)["realtime"].margin == MAX_MARGIN
    for now in range(1, 100):
        controller.update(make_load(), float(now))
    assert controller.outputs(100.0)["realtime"].margin == MAX_MARGIN
    observe(controller, "itl", 10, count=50_000, now=100.0)
    assert controller.outputs(100.0)["realtime"].margin == 0.0


# -- the floor -----------------------------------------------------------------------------------------------------


@pytest.mark.trap(9)
def test_a_starved_tier_is_owed_its_floor_and_is_then_not_paused() -> None:
    """Trap 9."""
    controller = SLAController(make_tiers(bulk={"floor": 0.02}, batch={"floor": 0.0}))
    states = [make_state("rt"), make_decode("b")]
    for _ in range(30):
        controller.observe_step(0.1, {"realtime": 0.1}, ["realtime", *BULK], 0.0, 0.0)
    assert budgets(controller, states).tiers["bulk"].guaranteed
    assert not budgets(controller, states).tiers["bulk"].decodes_only
    assert budgets(controller, states).tiers["batch"].decodes_only, "no floor, no debt"
    controller.observe_step(0.1, {"bulk": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
    assert not budgets(controller, states).tiers["bulk"].guaranteed, "paid"


def test_what_wants_nothing_is_owed_nothing() -> None:
    controller = SLAController(make_tiers(bulk={"floor": 0.1}))
    for _ in range(1000):
        controller.observe_step(0.1, {"realtime": 0.1}, ["realtime"], 0.0, 0.0)
    assert not budgets(controller, [make_state("rt")]).tiers["bulk"].guaranteed


@pytest.mark.parametrize("slo", [{"ttft_p99_ms": 500}, {"ttft_p99_ms": 30_000}, {"itl_p99_ms": 100}])
def test_the_debt_reaches_its_threshold_whatever_the_promise_and_no_burst_follows(slo: dict[str, Any]) -> None:
    controller = SLAController(make_tiers(realtime={"slo": slo}, bulk={"floor": 0.02}))
    states = [make_state("rt"), make_decode("b")]
    for _ in range(10_000):
        controller.observe_step(0.1, {"realtime": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
    assert budgets(controller, states).tiers["bulk"].guaranteed
    controller.observe_step(MAX_DEFICIT_S, {"bulk": MAX_DEFICIT_S}, ["realtime", "bulk"], 0.0, 0.0)
    controller.observe_step(0.1, {"bulk": 0.1}, ["realtime", "bulk"], 0.0, 0.0)
    assert not budgets(controller, states).tiers["bulk"].guaranteed, "an hour of flood is paid within a second"


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


@pytest.mark.trap(6)
def test_misses_above_halve_bulk_once_until_the_cut_shows() -> None:
    """Trap 6: no second cut before the first has had its effect."""
    outer = Outer()
    observe(outer.controller, "ttft", 900, now=0.4, bulk_ms=500)
    [decision] = [d for d in outer.update(MIXED, rounds=10) if d.tier == "bulk"]
    assert (decision.old, decision.new, decision.signal) == (64, 32, "slo_misses")
    assert decision.reason == "interactive tiers miss their targets"
    smaller = make_load(held={"bulk": 32, "realtime": 4}, bulk=100)
    assert not outer.update(smaller, rounds=10), "the misses before the cut are answered"
    observe(outer.controller, "ttft", 900, now=outer.now, bulk_ms=500)
    outer.update(smaller)
    assert outer.batch_size("bulk") == 16


def test_bulk_that_holds_nothing_is_not_cut_for_the_misses_of_others() -> None:
    outer = Outer()
    observe(outer.controller, "ttft", 900, now=0.4, bulk_ms=500)
    cuts = [d for d in outer.update(make_load(held={"realtime": 80, "batch": 1}), rounds=5) if d.tier in BULK]
    assert [(d.tier, d.direction) for d in cuts] == [("batch", "down")], "whoever holds something is"


def late_everywhere(controller: SLAController, samples: int, now: float) -> None:
    """Late first tokens that bulk is to blame for, and late gaps."""
    observe(controller, "ttft", 900, count=samples, now=now, bulk_ms=500)
    observe(controller, "itl", 900, count=samples, now=now, bulk_ms=850)


CROWDED = replace(make_load(held={"bulk": 64, "realtime": 64}, bulk=100, realtime=9), decodes_s={"realtime": 0.138})
ROOMY = make_load(held={"bulk": 64, "realtime": 1}, bulk=100)


@pytest.mark.trap(8)
@pytest.mark.parametrize(
    ("samples", "age_s", "moved"),
    [
        (0, 0.1, set()),
        (MIN_SAMPLES - 1, 0.1, set()),
        (1000, WINDOW_S + 1, set()),
        (MIN_SAMPLES, 0.1, {("bulk", "batch_size"), ("realtime", "batch_size"), ("realtime", "max_wait_ms")}),
    ],
    ids=["no data", "too little", "stale", "enough"],
)
def test_without_data_nothing_moves(samples: int, age_s: float, moved: set[tuple[str, str]]) -> None:
    """Trap 8: with interactive work present, silence is neither good nor bad news; nor is what is long past."""
    for load in (CROWDED, ROOMY):
        outer = Outer(make_tiers(realtime={"max_wait_ms": {"min": 0, "start": 16, "max": 20}}), now=age_s)
        late_everywhere(outer.controller, samples, now=0.0)
        seen = {(d.tier, d.knob) for d in outer.update(load, rounds=20)}
        by_load = {("realtime", "max_wait_ms")} if load is CROWDED else {("realtime", "batch_size")}
        assert seen == moved - by_load


def test_between_the_thresholds_nothing_moves() -> None:
    """The dead band: 1.5 % of misses are neither a reason to cut nor to grow."""
    outer = Outer()
    observe(outer.controller, "ttft", 100, count=197)
    observe(outer.controller, "ttft", 900, count=3, bulk_ms=500)
    assert not [d for d in outer.update(MIXED, rounds=5) if d.tier == "bulk"]


def test_the_token_ceiling_moves_with_the_slots_and_is_reported_like_them() -> None:
    outer = Outer()
    size, tokens = outer.update_all(make_load(kv_usage=0.9, held={"bulk": 32}, bulk=5))
    assert (size.knob, size.old, size.new) == ("batch_size", 64, 25)
    assert (tokens.knob, tokens.old, tokens.new) == ("batch_tokens", 2048, 25 * 32)
    assert (tokens.signal, tokens.reason) == (size.signal, size.reason)


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
    slow = replace(make_load(held={"realtime": 64}), decodes_s={"realtime": 0.138})
    [decision] = [d for d in outer.update(slow, rounds=20) if d.tier == "realtime"]
    assert (decision.knob, decision.old, decision.new, decision.signal) == ("batch_size", 64, 51, "itl_p99")
    observe(outer.controller, "itl", 150, now=outer.now)
    outer.update(replace(slow, held={"realtime": 51}, decodes_s={"realtime": 0.112}))
    assert outer.batch_size("realtime") == 40


def test_prefills_that_make_gaps_long_do_not_cost_the_interactive_tier_its_slots() -> None:
    """Fewer slots would let requests wait, and shorten no gap: the margin does."""
    outer = Outer()
    observe(outer.controller, "itl", 150, now=0.4)
    quick = replace(make_load(held={"realtime": 64}), decodes_s={"realtime": 0.023})
    assert not [d for d in outer.update(quick, rounds=20) if d.knob == "batch_size" and d.direction == "down"]
    assert outer.controller.outputs(outer.now)["realtime"].margin > 0.5


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


def test_misses_that_less_bulk_would_not_have_spared_move_nothing_of_it() -> None:
    """Anti-windup: an overload of interactive traffic alone is not mended by less bulk."""
    outer = Outer()
    observe(outer.controller, "ttft", 900, now=0.4, bulk_ms=100)
    assert not [d for d in outer.update(MIXED) if d.tier == "bulk" and d.direction == "down"]
    assert outer.controller.explain(outer.now)["tiers"]["realtime"]["signals"]["margins"]["ttft"] == 0.0


@pytest.mark.trap(11)
def test_old_requests_that_wait_cut_bulk_before_any_p99_says_so() -> None:
    """Trap 11: the knee is sharp; queue age comes first."""
    outer = Outer()
    with_bulk(outer.controller)
    aged = replace(MIXED, age_share=0.6)
    [decision] = [d for d in outer.update(aged) if d.tier == "bulk"]
    assert (decision.old, decision.new, decision.signal) == (64, 32, "queue_age")


@pytest.mark.parametrize(("per_s", "wait_ms"), [(1000, 20), (2, 0)])
def test_an_interactive_tier_waits_only_where_arrivals_come_within_a_steps_fixed_cost(
    per_s: int, wait_ms: float
) -> None:
    outer = Outer(make_tiers(realtime={"max_wait_ms": {"min": 0, "start": 10, "max": 20}}))
    for _ in range(60):
        outer.controller.observe_arrivals("realtime", int(per_s * UPDATE_S))
        outer.update(replace(make_load(), step_s=0.1))
    assert outer.max_wait_ms("realtime") == pytest.approx(wait_ms, abs=2.0), "within the dead band"


# -- dry run and pins ----------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_would_do_and_does_nothing() -> None:
    dry = make_tiers().model_copy(update={"controller": ControllerSwitches(dry_run=True)})
    outer = Outer(dry)
    decisions = [d for d in outer.update(BULK_WAITS, rounds=3) if d.tier == "bulk"]
    assert [(d.new, d.acted) for d in decisions] == [(66, False), (68, False), (70, False)]
    assert outer.batch_size("bulk") == 64
    knob = outer.controller.explain(outer.now)["tiers"]["bulk"]["knobs"]["batch_size"]
    assert (knob["value"], knob["chosen"], knob["dry_run"]) == (64, 70, True)


def test_a_pinned_knob_never_moves() -> None:
    outer = Outer(make_tiers(bulk={"pinned": {"batch_size": 7}}))
    assert not [d for d in outer.update(BULK_WAITS, rounds=5) if d.tier == "bulk"]
    assert outer.batch_size("bulk") == 7
    assert outer.controller.explain(outer.now)["tiers"]["bulk"]["knobs"]["batch_size"]["pinned"]


def test_without_feed_forward_tiers_are_strict_priorities_with_fixed_budgets() -> None:
    strict = make_tiers().model_copy(update={"controller": ControllerSwitches(feed_forward=False)})
    of = budgets(SLAController(strict), [make_state("rt"), make_decode("b")]).tiers
    assert not any(b.decodes_only or b.guaranteed for b in of.values())
    assert {b.limit.limit_s for b in of.values()} == {float("inf")}


# -- reconfiguring -------------------------------------------------------------------------------------------------


def test_what_keeps_its_bounds_goes_on_and_what_has_others_begins_anew() -> None:
    outer = Outer()
    outer.update(BULK_WAITS, rounds=10)
    assert outer.batch_size("bulk") == 84
    outer.controller.reconfigure(make_tiers(gold={"priority": 50}))
    assert outer.batch_size("bulk") == 84
    bounds = {"min": 1, "start": 10, "max": 50}
    outer.controller.reconfigure(make_tiers(bulk={"batch_size": bounds}))
    assert outer.batch_size("bulk") == 10
    assert json.dumps(outer.controller.explain(outer.now)), "plain data"


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


@dataclass(frozen=True)
class Weather:
    """What fifty updates in a row see. Bulk is to blame for nearly all of every latency."""

    ttft_ms: float = 20
    itl_ms: float = 20
    kv_usage: float = 0.1
    age_share: float = 0.0
    arrivals: int = 3  # of either tier, between two updates
    crowded: bool = True  # the interactive tier has all it may hold, and more wait

    def blow(self, outer: Outer) -> list[Decision]:
        for kind, ms in (("ttft", self.ttft_ms), ("itl", self.itl_ms)):
            observe(outer.controller, kind, ms, count=30, now=outer.now, bulk_ms=0.9 * ms)
        with_bulk(outer.controller, outer.now)
        for tier in ("realtime", "bulk"):
            outer.controller.observe_arrivals(tier, self.arrivals)
        held = {"realtime": outer.batch_size("realtime") if self.crowded else 1, "bulk": outer.batch_size("bulk")}
        load = make_load(self.kv_usage, held, bulk=9, realtime=9 if self.crowded else 0)
        return outer.update(
            replace(load, age_share=self.age_share, decodes_s={t: 0.01 * (1 + n) for t, n in load.held.items()})
        )


FAIR = Weather()
FOUL = (
    Weather(kv_usage=0.99),
    Weather(ttft_ms=2000, crowded=False),
    Weather(itl_ms=300),
    Weather(age_share=0.9),
    Weather(95, 95, 0.8, arrivals=500),
    Weather(arrivals=0),
)


def test_knobs_stay_inside_their_bounds_whatever_comes() -> None:
    """Every signal moves something here, and every knob runs into its bounds: else this would show nothing."""
    tiers = make_tiers(
        realtime={"max_wait_ms": {"min": 1, "start": 16, "max": 20}, "batch_size": {"min": 20, "start": 64, "max": 70}},
        bulk={"max_wait_ms": {"min": 5, "start": 10, "max": 30}, "batch_size": {"min": 3, "start": 64, "max": 70}},
    )
    outer, moved_by, reached = Outer(tiers), set(), set()
    for weather in [weather for foul in FOUL for weather in (FAIR, foul)] * 2:
        for d in [d for _ in range(50) for d in weather.blow(outer)]:
            bounds = getattr(tiers[d.tier], d.knob)
            assert bounds.min <= d.new <= bounds.max and d.new != d.old
            assert d.signal and d.reason
            assert d.direction == ("up" if d.new > d.old else "down")
            moved_by.add(d.signal)
            reached |= {(d.tier, d.knob, end) for end in ("min", "max") if d.new == getattr(bounds, end)}
    assert moved_by == {"slo_misses", "queue_age", "kv_usage", "queue", "itl_p99", "ttft_p99", "arrival_rate"}
    assert {(tier, "batch_size", end) for tier in ("realtime", "bulk") for end in ("min", "max")} <= reached


def test_outputs_show_what_was_observed() -> None:
    outer = Outer()
    observe(outer.controller, "ttft", 200)
    outer.controller.observe_end("realtime", met_slo=True, gaps=9, now=0.0)
    outer.controller.observe_end("realtime", met_slo=False, gaps=9, now=0.0)
    shown = outer.controller.outputs(0.0)
    assert shown["realtime"].ttft_p99_s == pytest.approx(0.2, rel=BUCKET_WIDTH)
    assert shown["realtime"].itl_p99_s is None
    assert shown["realtime"].attainment == 0.5
    assert shown["bulk"].attainment is None
    later = outer.controller.outputs(WINDOW_S + 1.0)["realtime"]
    assert (later.ttft_p99_s, later.attainment) == (None, None), "the past is not the present"
