"""The outer loop: what moves a knob, which way, and what moves nothing."""

from dataclasses import dataclass, replace

import pytest

from scheduler.control.controller import SLAController
from scheduler.control.knobs import Decision
from tests.scheduler.builders import make_state, make_tiers
from tests.scheduler.control.builders import OuterLoop, budgets_of, make_load, observe, run_bulk

BULK_WAITS = make_load(held={"bulk": 64}, bulk=100)
MIXED = make_load(held={"bulk": 64, "realtime": 4}, bulk=100)


def of_tier(decisions: list[Decision], *tiers: str) -> list[Decision]:
    return [d for d in decisions if d.tier in tiers]


# -- bulk's batch size ---------------------------------------------------------------------------------------------


def test_bulk_grows_in_small_steps_up_to_its_bound_while_no_tier_above_has_requests() -> None:
    outer = OuterLoop(make_tiers(bulk={"batch_size": {"min": 1, "start": 64, "max": 70}}))
    decisions = of_tier(outer.update(BULK_WAITS, rounds=10), "bulk")
    sizes = [64.0, *(d.new for d in decisions)]
    assert len(sizes) > 2 and sizes == sorted(sizes) and sizes[-1] == 70
    assert all(d.old == size and d.knob == "batch_size" for d, size in zip(decisions, sizes, strict=False))
    assert {(d.signal, d.reason) for d in decisions} == {("queue", "work waits and bulk harms nobody above")}


@pytest.mark.trap(6)
def test_misses_above_halve_bulk_once_until_the_cut_shows() -> None:
    """Trap 6: no second cut before the first has had its effect."""
    outer = OuterLoop()
    observe(outer.controller, "ttft", 900, now=0.4, bulk_ms=500)
    [decision] = of_tier(outer.update(MIXED, rounds=10), "bulk")
    assert (decision.old, decision.new, decision.signal) == (64, 32, "slo_misses")
    assert decision.reason == "interactive tiers miss their targets"
    smaller = make_load(held={"bulk": 32, "realtime": 4}, bulk=100)
    assert not outer.update(smaller, rounds=10), "the misses before the cut are answered"
    observe(outer.controller, "ttft", 900, now=outer.now, bulk_ms=500)
    outer.update(smaller)
    assert outer.batch_size("bulk") == 16


def test_misses_that_less_bulk_would_not_have_spared_do_not_cut_it() -> None:
    """Anti-windup: less bulk does not help against an overload of interactive traffic alone."""
    outer = OuterLoop()
    observe(outer.controller, "ttft", 900, now=0.4, bulk_ms=100)
    assert not [d for d in of_tier(outer.update(MIXED), "bulk") if d.direction == "down"]


def late_everywhere(controller: SLAController, samples: int, now: float) -> None:
    """Late first tokens that bulk took part in, and late gaps."""
    observe(controller, "ttft", 900, count=samples, now=now, bulk_ms=500)
    observe(controller, "itl", 900, count=samples, now=now, bulk_ms=850)


FULL = replace(make_load(held={"bulk": 64, "realtime": 48}, bulk=100, realtime=9), decodes_s={"realtime": 0.138})
HAS_SLOTS = make_load(held={"bulk": 64, "realtime": 1}, bulk=100)


@pytest.mark.trap(8)
@pytest.mark.parametrize(
    ("samples", "age_s", "moved"),
    [
        (0, 0.1, set()),
        (10, 0.1, set()),
        (1000, 60.0, set()),
        (50, 0.1, {("bulk", "batch_size"), ("realtime", "batch_size"), ("realtime", "max_wait_ms")}),
    ],
    ids=["no data", "too little", "stale", "enough"],
)
def test_without_data_nothing_moves(samples: int, age_s: float, moved: set[tuple[str, str]]) -> None:
    """Trap 8: with interactive work present, silence is neither good nor bad news; nor is what is long past."""
    for load in (FULL, HAS_SLOTS):
        outer = OuterLoop(make_tiers(realtime={"max_wait_ms": {"min": 0, "start": 16, "max": 20}}), now=age_s)
        late_everywhere(outer.controller, samples, now=0.0)
        found = {(d.tier, d.knob) for d in outer.update(load, rounds=20)}
        by_load = {("realtime", "max_wait_ms")} if load is FULL else {("realtime", "batch_size")}
        assert found == moved - by_load


@pytest.mark.parametrize(("late", "moves"), [(3, []), (6, ["down"])])
def test_bulk_is_cut_from_twice_the_misses_that_are_allowed(late: int, moves: list[str]) -> None:
    """The dead band: 1.5 % of misses are neither a reason to cut nor to grow."""
    outer = OuterLoop()
    observe(outer.controller, "ttft", 100, count=200 - late)
    observe(outer.controller, "ttft", 900, count=late, bulk_ms=500)
    assert [d.direction for d in of_tier(outer.update(MIXED, rounds=5), "bulk")] == moves


def test_the_token_ceiling_moves_with_the_slots_and_is_reported_like_them() -> None:
    outer = OuterLoop()
    size, tokens = outer.update_all(make_load(kv_usage=0.9, held={"bulk": 32, "realtime": 1}, bulk=5))
    assert (size.knob, tokens.knob, size.direction) == ("batch_size", "batch_tokens", "down")
    assert tokens.new / tokens.old == size.new / size.old
    assert (tokens.signal, tokens.reason) == (size.signal, size.reason)


def test_full_kv_cuts_bulk_below_what_it_holds_once() -> None:
    outer = OuterLoop()
    outer.controller.observe_end("realtime", True, outer.now)
    [decision] = outer.update(make_load(kv_usage=0.9, held={"bulk": 20}, bulk=5), rounds=10)
    assert decision.new < 20 and (decision.signal, decision.reason) == ("kv_usage", "KV blocks run out")
    held = {"bulk": int(decision.new)}
    assert outer.update(make_load(kv_usage=0.8, held=held, bulk=5))[0].direction == "down", "the reserve is not free"
    assert outer.update(make_load(kv_usage=0.7, held=held, bulk=5))[0].direction == "up"


def test_full_kv_cuts_nothing_where_no_interactive_request_was_for_a_while() -> None:
    outer = OuterLoop()
    assert outer.update(make_load(kv_usage=0.99, held={"bulk": 20}), rounds=10) == []


# -- the interactive batch size ------------------------------------------------------------------------------------


def test_slow_tokens_shrink_the_interactive_batch_once_per_evidence() -> None:
    """The p99 window remembers 30 s: without this, one slow second would cut the batch to its minimum."""
    outer = OuterLoop()
    for _ in range(2):
        observe(outer.controller, "itl", 150, now=max(0.4, outer.now))
        before = outer.batch_size("realtime")
        held = before - 8
        slow = replace(make_load(held={"realtime": held}), decodes_s={"realtime": 0.138})
        [decision] = of_tier(outer.update(slow, rounds=20), "realtime")
        assert (decision.knob, decision.old, decision.signal) == ("batch_size", before, "itl_p99")
        assert decision.new == held, "no request that runs now has to wait for a slot"


def test_closed_loops_keep_their_slots() -> None:
    """Each slot that was taken away would make one of them wait for it, and none of them faster."""
    outer = OuterLoop()
    observe(outer.controller, "itl", 150, now=0.4)
    slow = replace(make_load(held={"realtime": outer.batch_size("realtime")}), decodes_s={"realtime": 0.138})
    assert not of_tier(outer.update(slow, rounds=20), "realtime")
    observe(outer.controller, "ttft", 900, now=outer.now)
    observe(outer.controller, "itl", 150, now=outer.now)
    fewer = replace(slow, held={"realtime": 40}, waiting={"realtime": 3})
    assert {d.direction for d in of_tier(outer.update(fewer), "realtime")} == {"up"}, "a slot is what they wait for"


def test_an_overloaded_tier_keeps_its_slots() -> None:
    """With fewer slots, requests would wait even longer, and none would keep its SLO."""
    outer = OuterLoop()
    waiting = [make_state(f"rt{i}", claimed_s=-10.0) for i in range(4)]
    slow = replace(make_load(held={"realtime": 48}, realtime=50), decodes_s={"realtime": 0.138})
    observe(outer.controller, "itl", 150, now=0.4)
    budgets_of(outer.controller, waiting)
    assert not [d for d in outer.update(slow, rounds=5) if d.tier == "realtime"]
    budgets_of(outer.controller, [])
    observe(outer.controller, "itl", 150, now=outer.now + 0.1)
    assert [d.direction for d in of_tier(outer.update(slow), "realtime")] == ["down"], "no longer overloaded"


# -- max-wait ------------------------------------------------------------------------------------------------------


def test_late_first_tokens_shorten_the_wait() -> None:
    outer = OuterLoop(make_tiers(realtime={"max_wait_ms": {"min": 0, "start": 16, "max": 20}}))
    observe(outer.controller, "ttft", 900)
    [decision] = outer.update(make_load(held={"realtime": 1}))
    assert (decision.knob, decision.signal) == ("max_wait_ms", "ttft_p99") and decision.new <= 8
    outer.update(make_load(held={"realtime": 1}), rounds=10)
    assert outer.max_wait_ms("realtime") == 0


@pytest.mark.parametrize(("per_s", "wait_ms"), [(1000, 20), (2, 0)])
def test_an_interactive_tier_waits_only_where_arrivals_come_within_a_steps_fixed_cost(
    per_s: int, wait_ms: float
) -> None:
    outer = OuterLoop(make_tiers(realtime={"max_wait_ms": {"min": 0, "start": 10, "max": 20}}))
    outer.arrive("realtime", per_s, 30, replace(make_load(), step_s=0.1))
    assert outer.max_wait_ms("realtime") == pytest.approx(wait_ms, abs=2.0), "within the dead band"


def test_floods_lengthen_the_wait_to_what_fills_a_batch_and_quiet_ends_it() -> None:
    outer = OuterLoop(make_tiers(bulk={"max_wait_ms": {"min": 0, "start": 0, "max": 1000}}))
    decisions = outer.arrive("bulk", per_s=100, seconds=60)
    assert outer.max_wait_ms("bulk") == pytest.approx(640, abs=100), "64 at 100 a second, within the dead band"
    assert {(d.signal, d.reason) for d in decisions} == {("arrival_rate", "the time a batch takes to fill")}
    outer.arrive("bulk", per_s=2, seconds=60)
    assert outer.max_wait_ms("bulk") < 100


# -- always --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """What fifty updates in a row see. Bulk takes part in nearly all of every latency."""

    ttft_ms: float = 20
    itl_ms: float = 20
    kv_usage: float = 0.1
    arrivals: int = 3  # of either tier, between two updates
    is_full: bool = True  # the interactive tier holds nearly all that it may hold, and more wait

    def update(self, outer: OuterLoop) -> list[Decision]:
        for kind, ms in (("ttft", self.ttft_ms), ("itl", self.itl_ms)):
            observe(outer.controller, kind, ms, count=30, now=outer.now, bulk_ms=0.9 * ms)
        run_bulk(outer.controller, outer.now)
        for tier in ("realtime", "bulk"):
            outer.controller.observe_arrivals(tier, self.arrivals)
        size = int(0.9 * outer.batch_size("realtime"))
        held = {"realtime": size if self.is_full else 1, "bulk": outer.batch_size("bulk")}
        load = make_load(self.kv_usage, held, bulk=9, realtime=9 if self.is_full else 0)
        return outer.update(replace(load, decodes_s={t: 0.01 * (1 + n) for t, n in load.held.items()}))


GOOD = Conditions()
BAD = (
    Conditions(kv_usage=0.99),
    Conditions(ttft_ms=2000, is_full=False),
    Conditions(itl_ms=300),
    Conditions(95, 95, 0.8, arrivals=500),
    Conditions(arrivals=0),
)


def test_knobs_stay_inside_their_bounds_in_all_conditions() -> None:
    """Every signal moves something here, and every knob runs into its bounds: else this would show nothing."""
    tiers = make_tiers(
        realtime={"max_wait_ms": {"min": 1, "start": 16, "max": 20}, "batch_size": {"min": 20, "start": 64, "max": 70}},
        bulk={"max_wait_ms": {"min": 5, "start": 10, "max": 30}, "batch_size": {"min": 3, "start": 64, "max": 70}},
    )
    outer, moved_by, reached = OuterLoop(tiers), set(), set()
    for conditions in [conditions for bad in BAD for conditions in (GOOD, bad)] * 2:
        for d in [d for _ in range(50) for d in conditions.update(outer)]:
            bounds = getattr(tiers[d.tier], d.knob)
            assert bounds.min <= d.new <= bounds.max and d.new != d.old
            assert d.signal and d.reason
            assert d.direction == ("up" if d.new > d.old else "down")
            moved_by.add(d.signal)
            reached |= {(d.tier, d.knob, end) for end in ("min", "max") if d.new == getattr(bounds, end)}
    assert moved_by == {"slo_misses", "kv_usage", "queue", "itl_p99", "ttft_p99", "arrival_rate"}
    assert {(tier, "batch_size", end) for tier in ("realtime", "bulk") for end in ("min", "max")} <= reached
