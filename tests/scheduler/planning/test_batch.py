"""Batch formation: one plan at a time, from states made by hand."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import StepPlan
from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import TierSet
from scheduler.control.budget import Budgets, TierBudget
from scheduler.control.step_limit import StepLimit
from scheduler.planning.batch import form_batch
from scheduler.planning.draft import MIN_CHUNK, largest_chunk
from scheduler.planning.prompt_prefixes import PromptPrefixes
from scheduler.request_state import RequestState, Status
from tests.scheduler.builders import (
    make_decode,
    make_info,
    make_state,
    make_table,
    make_tiers,
    make_view,
    preempted,
    ran,
)

COST = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.001)
ATTENDING = StepCost(step_s=0.01, prefill_token_s=0.001, attend_s=1e-6, context_token_s=1e-6, decode_s=0.002)


def budget(limit_s: float = NEVER_S, *, extra_share: float = 0.0, **changes: Any) -> TierBudget:
    return TierBudget(**{"max_num_seqs": 64, "limit": StepLimit(limit_s, extra_share), **changes})


def form(
    states: list[RequestState],
    *,
    tiers: TierSet | None = None,
    now: float = 0.0,
    view: dict[str, Any] | None = None,
    cost: StepCost = COST,
    decode_cost: StepCost | None = None,
    **budgets: TierBudget,
) -> StepPlan:
    """A plan; the tiers not named have a budget without limits."""
    tiers = tiers or make_tiers()
    of_tier = {tier.name: budgets.get(tier.name, budget()) for tier in tiers.by_priority}
    return form_batch(
        0,
        make_view(**(view or {})),
        tiers.by_priority,
        make_table(tiers, states),
        Budgets(of_tier, cost, decode_cost or cost),
        now,
        frozenset(),
        PromptPrefixes(make_info()),
    )


# -- order ---------------------------------------------------------------------------------------------------------


def test_higher_tiers_first_then_decodes_then_prefills_by_deadline() -> None:
    states = [
        make_state("late", "realtime", deadline_ms=2),
        make_state("early", "realtime", deadline_ms=1),
        make_decode("bulk decode"),
        make_decode("realtime decode", "realtime"),
    ]
    assert list(ran(form(states))) == ["realtime decode", "early", "late", "bulk decode"]


def test_a_long_prompt_is_cut_into_chunks_of_what_the_step_holds() -> None:
    plan = form([make_decode("d", "realtime"), make_state("long", prompt=500)], view={"max_step_tokens": 100})
    assert ran(plan) == {"d": 1, "long": 99}


def test_prefills_under_way_go_before_newcomers_whatever_their_deadlines() -> None:
    under_way = make_state("under way", status=Status.RUNNING, prompt=100, computed=50, deadline_ms=9)
    plan = form([make_state("newcomer", prompt=100, deadline_ms=1), under_way], view={"max_step_tokens": 60})
    assert ran(plan) == {"under way": 50, "newcomer": 10}


# -- the tier's limits ---------------------------------------------------------------------------------------------


def test_decodes_and_prefills_together_stay_within_the_batch_size() -> None:
    """After a cut of the batch size more may be resident than may run."""
    states = [make_decode(f"d{i}") for i in range(3)]
    states += [make_state(f"p{i}", "bulk", Status.RUNNING, prompt=64, computed=32) for i in range(3)]
    assert len(form(states, bulk=budget(max_num_seqs=4)).run) == 4


def test_beyond_the_batch_size_decodes_take_turns() -> None:
    states = [make_decode("ran last", last_step=7), make_decode("sat out", last_step=6)]
    assert list(ran(form(states, bulk=budget(max_num_seqs=1)))) == ["sat out"]


# -- the time budget -----------------------------------------------------------------------------------------------


def test_bulk_decodes_fill_the_step_only_as_far_as_its_time_goes() -> None:
    states = [make_decode("rt", "realtime")] + [make_decode(f"b{i}") for i in range(10)]
    plan = form(states, bulk=budget(limit_s=0.0141))
    assert len(plan.run) == 4  # 10 ms a step, 1 ms a decode
    assert not plan.preempt, "a sequence that sits a step out keeps its KV"


def test_bulk_waits_for_the_time_that_its_next_decode_takes() -> None:
    """A chunk or a decode of a lower tier takes none of this time, or it would wait for ever."""
    rt, long = make_decode("rt", "realtime"), make_decode("long", prompt=1000)
    others = [make_state("b", "bulk", prompt=500), make_decode("batch", "batch")]
    cost = replace(COST, context_token_s=1e-4)  # the long decode takes 0.1 s
    for added_s, runs in ((0.05, False), (0.102, True)):
        bulk, batch = (budget(added_s=added_s, alone_s=0.02) for _ in range(2))
        plan = form([rt, long, *others], bulk=bulk, batch=batch, decode_cost=cost)
        assert list(ran(plan))[1:2] == (["long"] if runs else [])


def test_bulk_waits_for_the_time_that_its_next_chunk_takes() -> None:
    """A chunk of a shorter prompt takes none of this time, or long prompts would wait for one another and never end."""
    rt = make_decode("rt", "realtime")
    long = make_state("long", "bulk", Status.RUNNING, prompt=2000, computed=1500, deadline_ms=1)
    others = [make_state("short", "bulk", Status.RUNNING, prompt=500, computed=16), make_state("batch", "batch")]
    cost = replace(COST, attend_s=2e-6)  # 16 tokens of the long prompt take 64 ms
    for added_s, runs in ((0.05, {}), (0.066, {"long": MIN_CHUNK})):
        bulk, batch = (budget(added_s=added_s, beside_s=0.02) for _ in range(2))
        assert ran(form([rt, long, *others], bulk=bulk, batch=batch, cost=cost)) == {"rt": 1, **runs}


def test_a_chunk_that_no_interactive_deadline_has_time_for_is_left_out() -> None:
    long = make_state("long", "bulk", Status.RUNNING, prompt=2000, computed=1500, deadline_ms=1)
    states = [make_decode("rt", "realtime"), long, make_state("short", "bulk", Status.RUNNING, prompt=16)]
    cost = replace(COST, attend_s=2e-6)
    assert ran(form(states, bulk=budget(limit_s=0.05), cost=cost)) == {"rt": 1, "short": 16}


def test_a_decode_that_no_interactive_deadline_has_time_for_is_left_out() -> None:
    states = [make_decode("rt", "realtime"), make_decode("long", prompt=1000), make_decode("short")]
    cost = replace(COST, context_token_s=1e-4)
    assert list(ran(form(states, bulk=budget(limit_s=0.1), decode_cost=cost))) == ["rt", "short"]


def test_a_step_of_decodes_has_its_own_costs_until_a_prefill_joins_it() -> None:
    decodes = [make_decode(f"b{i}") for i in range(10)]
    cheap = replace(COST, decode_s=0.0005)
    assert len(form(decodes, bulk=budget(limit_s=0.0151), decode_cost=cheap).run) == 10
    plan = form([make_state("rt", "realtime", prompt=20), *decodes], bulk=budget(limit_s=0.0351), decode_cost=cheap)
    assert len(plan.run) == 6, "the prefill takes 20 ms, and beside it, a decode takes 1 ms"


def test_a_bulk_chunk_is_cut_to_the_time_that_is_left() -> None:
    prefill = make_state("b", "bulk", prompt=500)
    assert ran(form([prefill], bulk=budget(limit_s=0.05))) == {"b": 40}
    assert ran(form([make_decode("rt", "realtime"), prefill], bulk=budget(limit_s=0.05))) == {"rt": 1, "b": 39}


@given(st.integers(0, 4000), st.integers(0, 4000), st.floats(-1.0, 8.0))
def test_a_chunk_is_as_large_as_fits(wanted: int, context: int, left_s: float) -> None:
    chunk = largest_chunk(wanted, context, left_s, ATTENDING)
    assert 0 <= chunk <= wanted
    assert chunk == 0 or ATTENDING.run(chunk, context) <= left_s or ATTENDING.prefill(chunk, context) <= left_s
    assert chunk == 0 or chunk == wanted or chunk >= MIN_CHUNK
    if chunk < wanted:
        assert ATTENDING.prefill(max(MIN_CHUNK, chunk + 1), context) > left_s


def test_chunks_too_small_to_be_worth_it_do_not_run_beside_other_work() -> None:
    states = [make_decode("rt", "realtime"), make_state("b", "bulk", prompt=500)]
    short_s = 0.011 + (MIN_CHUNK - 1) * 0.001
    assert ran(form(states, bulk=budget(limit_s=short_s))) == {"rt": 1}


def test_something_always_runs_however_little_time_there_is() -> None:
    no_time = budget(limit_s=0.0)
    assert ran(form([make_state("b", "bulk", prompt=500)], bulk=no_time)) == {"b": MIN_CHUNK}
    assert ran(form([make_decode("d")], bulk=no_time)) == {"d": 1}


# -- max-wait: wait or full ----------------------------------------------------------------------------------------

WAIT = budget(max_num_seqs=4, max_wait_s=0.02)


@pytest.mark.parametrize("tier", ["realtime", "bulk"])
@pytest.mark.parametrize("busy", [make_decode("busy", "realtime"), make_decode("busy", "bulk")], ids=["chat", "bulk"])
def test_newcomers_never_wait_where_the_engine_is_busy(busy: RequestState, tier: str) -> None:
    """Requests that arrive during a step share the next one anyway."""
    dense = replace(WAIT, arrival_gap_s=0.0001)
    assert "new" in ran(form([make_state("new", tier, claimed_s=1.0), busy], now=1.0, realtime=dense, bulk=dense))


@pytest.mark.parametrize(("arrival_gap_s", "waits"), [(0.001, True), (1.0, False)])
def test_an_idle_engine_waits_only_where_another_arrival_is_worth_it(arrival_gap_s: float, waits: bool) -> None:
    plan = form([make_state("new", claimed_s=1.0)], now=1.01, realtime=replace(WAIT, arrival_gap_s=arrival_gap_s))
    assert plan.is_empty == waits
    assert ran(form([make_state("new", claimed_s=1.0)], now=1.021, realtime=replace(WAIT, arrival_gap_s=arrival_gap_s)))


# -- which prefill first -------------------------------------------------------------------------------------------


def test_prompts_that_can_be_in_time_go_before_a_huge_one_that_cannot() -> None:
    """One poison prompt must not make all others late."""
    huge = make_state("huge", prompt=900)
    states = [huge, *(make_state(f"r{i}", prompt=20, claimed_s=5.0) for i in range(3))]
    assert list(ran(form(states, now=5.0))) == ["r0", "r1", "r2", "huge"]


# -- pausing -------------------------------------------------------------------------------------------------------

PAUSED = budget(added_s=0.0)


def test_decodes_beside_a_first_token_add_what_they_may_and_make_no_interactive_token_late() -> None:
    """The interactive prefill fills its part of the step: the fixed cost, and 101 tokens."""
    states = [make_state("rt", prompt=200), *(make_decode(f"b{i}") for i in range(9))]
    full_s = 0.111
    for limit_s, run in ((NEVER_S, {"rt": 101, "b0": 1, "b1": 1, "b2": 1}), (full_s, {"rt": 101})):
        bulk = budget(limit_s, added_s=0.0035)
        assert ran(form(states, realtime=budget(full_s), bulk=bulk)) == run


def test_bulk_is_not_paused_for_work_that_cannot_start() -> None:
    """All sequences that could be preempted have lost their KV as often as they may: if they paused, the newcomer would
    wait for ever."""
    exhausted = [make_decode(f"b{i}", prompt=150, preempted=3) for i in range(2)]
    plan = form([make_state("rt", prompt=64), *exhausted], view={"free_blocks": 1}, bulk=PAUSED)
    assert set(ran(plan)) == {"b0", "b1"}
    assert not plan.preempt


def test_an_overloaded_tier_is_served_in_order_except_for_prompts_that_are_too_long() -> None:
    """The step has time for 100 tokens: otherwise what can be in time goes first."""
    late, fresh = make_state("late", prompt=100, claimed_s=-5.0), make_state("fresh", prompt=100)
    room = {"limit_s": 0.111}
    assert list(ran(form([late, fresh], realtime=budget(**room, overloaded=True)))) == ["late"]
    assert next(iter(ran(form([late, fresh], realtime=budget(**room))))) == "fresh"
    huge = make_state("huge", prompt=900, claimed_s=-9.0)
    assert list(ran(form([huge, late], realtime=budget(**room, overloaded=True)))) == ["late", "huge"]
    # What is too long while everything takes twice as long, but not usually, keeps its place.
    slow = replace(COST, prefill_token_s=2 * COST.prefill_token_s, slowdown=2.0)
    long = make_state("long", prompt=400, claimed_s=-9.0)
    assert next(iter(ran(form([long, late], cost=slow, realtime=budget(0.5, overloaded=True))))) == "long"
    assert next(iter(ran(form([huge, late], cost=slow, realtime=budget(0.5, overloaded=True))))) == "late"


# -- the min share -----------------------------------------------------------------------------------------------------


def test_a_tier_with_a_guaranteed_share_goes_first_with_its_own_limit() -> None:
    flood = [make_decode(f"rt{i}", "realtime") for i in range(50)]
    bulk = [make_decode(f"b{i}") for i in range(20)]
    plan = form([*flood, *bulk], bulk=budget(min_share=0.5, limit_s=0.0151), realtime=budget(limit_s=0.0401))
    assert [run.seq_id[0] for run in plan.run] == ["b"] * 5 + ["r"] * 50
    assert not ran(form([*flood, *bulk], bulk=budget(limit_s=0.0151))).keys() & {s.id for s in bulk}


@pytest.mark.parametrize(("min_share", "num_tokens"), [(0.399, 50), (0.1995, 150), (0.02, 450)])
def test_prefills_leave_guaranteed_work_its_share_of_the_step(min_share: float, num_tokens: int) -> None:
    """A step takes 10 ms, a decode and a prompt's token 1 ms each."""
    bulk, prefill = [make_decode(f"b{i}") for i in range(40)], make_state("rt", prompt=500)
    plan = form([prefill, *bulk], bulk=budget(min_share=min_share), realtime=budget(limit_s=0.5))
    assert (len(plan.run), ran(plan)["rt"]) == (41, num_tokens)


def test_a_tier_with_boosted_requests_takes_its_share_once() -> None:
    bulk, prefill = [make_decode(f"b{i}") for i in range(39)], make_state("rt", prompt=500)
    plan = form(
        [prefill, *bulk, boosted(make_decode("job"))], bulk=budget(min_share=0.1995), realtime=budget(limit_s=0.5)
    )
    assert ran(plan)["rt"] == 150


# -- blocks and preemption -------------------------------------------------------------------------------------------


@pytest.mark.trap(1)
def test_equal_priorities_never_preempt_each_other_for_a_start() -> None:
    """Trap 1."""
    for tier in ("realtime", "bulk"):
        states = [make_decode("here", tier, prompt=160), make_state("new", tier, prompt=64)]
        plan = form(states, view={"free_blocks": 1})
        assert not plan.preempt
        assert list(ran(plan)) == ["here"]


@pytest.mark.trap(2)
def test_no_sequence_is_preempted_for_a_newcomer_that_cannot_start_now() -> None:
    """Trap 2: neither blocks, nor a slot, nor time may be missing."""
    small = [make_decode("b", prompt=16)]
    assert not form([make_state("rt", prompt=160), *small], view={"free_blocks": 1}).preempt
    big = [make_decode("b", prompt=320), make_decode("rt0", "realtime", prompt=31)]
    for realtime in (budget(max_num_seqs=1), budget(limit_s=0.011)):
        assert not form([make_state("rt", prompt=160), *big], view={"free_blocks": 1}, realtime=realtime).preempt


def test_a_higher_newcomer_preempts_just_enough() -> None:
    states = [make_state("rt", prompt=64), *(make_decode(f"b{i}", prompt=31, claimed_s=i) for i in range(4))]
    plan = form(states, view={"free_blocks": 2})
    assert preempted(plan) == {"b3": "recompute"}
    assert "rt" in ran(plan)


@pytest.mark.trap(6)
def test_a_victim_is_not_run_resumed_or_paused_in_the_step_that_takes_its_blocks() -> None:
    """Trap 6: the freed blocks have one new owner, and the preempted sequence does not come back at once."""
    states = [make_state("rt", prompt=64), make_decode("b", prompt=160)]
    for bulk in (budget(), PAUSED):
        plan = form(states, view={"free_blocks": 0}, bulk=bulk)
        assert preempted(plan) == {"b": "recompute"}
        assert list(ran(plan)) == ["rt"]
        assert not plan.resume


def test_bulk_that_blocks_a_higher_tier_and_may_not_be_preempted_runs_on() -> None:
    """Whatever bulk may add: otherwise it would keep its blocks until no chat decodes any more."""
    states = [make_state("big", prompt=160), make_decode("d", "realtime", prompt=30)]
    states += [make_decode("b", prompt=150, preempted=3), make_decode("young", prompt=31)]
    for free_blocks, run in ((3, ["d", "b"]), (20, ["d", "big"])):
        plan = form(states, view={"free_blocks": free_blocks}, bulk=PAUSED)
        assert sorted(ran(plan)) == sorted(run)


def test_lower_tiers_start_nothing_while_a_higher_one_waits_for_blocks() -> None:
    """Else small bulk prompts would keep taking the blocks that the big interactive one waits for."""
    states = [make_state("big", prompt=160), make_state("small", "bulk", prompt=16), make_decode("d", "realtime")]
    assert list(ran(form(states, view={"free_blocks": 3}))) == ["d"]


@pytest.mark.parametrize(("free_blocks", "starts"), [(28, True), (27, False)])
def test_bulk_starts_only_if_it_leaves_the_reserve_free(free_blocks: int, starts: bool) -> None:
    """It needs 3 blocks, and the reserve is 25 of 100. A chat, and a min share, may take all that is free."""
    states = [make_decode("rt", "realtime", prompt=24), make_state("b", prompt=48, tier="bulk")]
    view = {"free_blocks": free_blocks}
    assert ("b" in ran(form(states, view=view, bulk=budget(kv_reserve=0.25)))) == starts
    assert "b" in ran(form(states, view=view))
    assert "chat" in ran(form([*states, make_state("chat", prompt=16 * free_blocks)], view=view))


def test_late_prefills_that_hold_all_slots_go_on_beside_newcomers_that_wait_for_one() -> None:
    """Else no slot would ever come free again."""
    late = [make_state(f"late{i}", "realtime", Status.RUNNING, prompt=400, computed=100) for i in range(2)]
    newcomer = make_state("new", prompt=20, claimed_s=5.0)
    assert set(ran(form([*late, newcomer], now=5.0, realtime=budget(max_num_seqs=2)))) == {"late0", "late1"}


# -- requests with deadlines of their own --------------------------------------------------------------------------


def boosted(state: RequestState, priority: float = 10.5) -> RequestState:
    state.boosted_to = priority
    return state


def test_who_goes_before_others_of_its_tier_needs_no_slot_and_leaves_no_reserve() -> None:
    states = [
        *(make_decode(f"d{i}") for i in range(4)),
        make_state("other", "bulk"),
        boosted(make_state("job", "bulk")),
    ]
    full = budget(max_num_seqs=4, kv_reserve=0.25)
    plan = form(states, bulk=full, view={"free_blocks": 10})
    assert list(ran(plan)) == ["job", "d0", "d1", "d2"], "a step has as many sequences as before"


def test_those_who_go_before_others_have_as_many_slots_as_the_tier() -> None:
    states = [boosted(make_decode(f"d{i}")) for i in range(4)]
    plan = form([*states, boosted(make_state("job", "bulk"))], bulk=budget(max_num_seqs=4))
    assert not plan.start


def test_urgent_requests_of_a_lower_tier_go_before_a_higher_one() -> None:
    urgent, own = boosted(make_decode("urgent", "batch")), boosted(make_decode("own", "batch"), 0.5)
    states = [make_decode("bulk"), make_decode("batch", "batch"), own, urgent]
    assert list(ran(form(states))) == ["urgent", "bulk", "own", "batch"]


def test_other_bulk_leaves_the_time_that_a_deadline_needs() -> None:
    """The job has 10 s for 99 tokens: no step may take longer than 101 ms. It has doubled where that is not enough."""
    floods = [make_decode(f"d{i}") for i in range(300)]
    job = boosted(make_decode("job", max_tokens=100))
    many = {"bulk": budget(max_num_seqs=512), "view": {"num_blocks": 2000, "free_blocks": 1000}}
    assert len(form([*floods, job], **many).run) == 91
    assert len(form([*floods, job], now=9.9, **many).run) == 12
    assert len(form([*floods, boosted(make_decode("part", urgent_ms=1))], **many).run) == 301, "jobs need many tokens"


def test_who_goes_before_others_and_cannot_run_yet_pauses_none_of_them() -> None:
    job = boosted(make_state("job", "bulk"))
    job.awaits_grammar = True
    plan = form([make_decode("chat", "realtime", last_step=1), make_decode("bulk", last_step=1), job])
    assert list(ran(plan)) == ["chat", "bulk"] and not plan.preempt


def test_interactive_requests_run_also_after_those_who_go_before_others() -> None:
    """Where an interactive tier has no higher priority than a bulk tier."""
    tiers = make_tiers(realtime={"priority": 10})
    states = [make_decode("chat", "realtime", tiers=tiers), boosted(make_decode("urgent", "batch", tiers=tiers))]
    assert set(ran(form(states, tiers=tiers))) == {"chat", "urgent"}
