from dataclasses import replace
from typing import Any

from engine.step_time.cost import StepCost
from scheduler.clock import NEVER_S
from scheduler.config import TierSet
from scheduler.control.budget import Budgets, TierBudget
from scheduler.drivers.streams.policy import View, decide
from scheduler.request_state import RequestState, Status
from tests.scheduler.builders import make_decode, make_state, make_table, make_tiers

COST = StepCost(step_s=0.02, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.0005)
TIERS = make_tiers(realtime={"max_slowdown": 1.6})


def view(*states: RequestState, tiers: TierSet = TIERS, traffic: bool = True, **changes: Any) -> View:
    """Return a view in which bulk alone, and what bulk adds to other steps, may take twice a step's fixed cost."""
    table = make_table(tiers, states)
    longest_s = 2 * COST.step_s
    budgets = {t.name: TierBudget(64, alone_s=longest_s, beside_s=longest_s) for t in tiers.by_priority}
    evictable = sorted((s for s in states if s.is_decode and not s.tier.is_interactive), key=lambda s: s.id)
    usual = View(tiers.by_priority, table, Budgets(budgets, COST, COST), NEVER_S, 2048, evictable, 1e6)
    return replace(usual, **{"has_traffic": traffic} | changes)


def started(of: View, now: float = 0.0) -> list[str]:
    return [state.id for state in decide(of, now).start]


def hung_up(of: View, now: float = 0.0) -> list[str]:
    return [state.id for state in decide(of, now).hang_up]


def waiting(name: str, tier: str = "realtime", **more: Any) -> RequestState:
    return make_state(name, tier, **more)


def at_server(name: str, tier: str = "realtime", **more: Any) -> RequestState:
    """Return a request that has been sent and has no token yet."""
    return make_state(name, tier, Status.RUNNING, **more)


def decodes(count: int, prefix: str = "b") -> list[RequestState]:
    return [make_decode(f"{prefix}{i:02}") for i in range(count)]


def test_interactive_requests_go_at_once_and_bulk_waits_for_their_first_tokens() -> None:
    assert started(view(waiting("a"), waiting("b"), waiting("c", "bulk"), *decodes(3))) == ["a", "b"]
    assert started(view(at_server("a"), waiting("c", "bulk"), *decodes(3))) == []
    assert started(view(make_decode("a", "realtime"), waiting("c", "bulk"), *decodes(3))) == ["c"]


def test_bulk_that_goes_before_others_of_its_tier_is_sent_first() -> None:
    hung_up = make_decode("part", status=Status.PREEMPTED)
    job = waiting("job", "bulk")
    job.boosted_to = 10.5
    assert started(view(waiting("w", "bulk"), hung_up, job, traffic=False)) == ["job", "part", "w"]


def test_an_idle_server_gets_bulk_and_a_due_min_share_does_not_wait() -> None:
    assert started(view(waiting("c", "bulk"))) == ["c"]
    of = view(at_server("a"), waiting("c", "bulk"), *decodes(1))
    due = {**of.budgets.tiers, "bulk": replace(of.budgets.tiers["bulk"], min_share=0.5)}
    assert started(replace(of, budgets=replace(of.budgets, tiers=due))) == ["c"]


def test_bulk_begins_one_prefill_at_a_time_beside_interactive_traffic() -> None:
    chat, long = make_decode("chat", "realtime"), [waiting(f"w{i}", "bulk", prompt=200) for i in range(3)]
    assert started(view(*long, chat, *decodes(2))) == ["w0"]
    beside = view(*long, chat, *decodes(2), at_server("p", "bulk", prompt=200))
    assert started(beside) == ["w0"], "the server computes the prompt before it now"
    assert started(replace(beside, is_unbegun=lambda state: state.id == "p")) == []
    short = [waiting(f"w{i}", "bulk", prompt=9) for i in range(10)]
    assert len(started(view(*short, chat, *decodes(2)))) == 2, "as many as take a step's fixed cost"


def test_between_chats_there_are_as_many_streams_as_can_be_hung_up_for_the_next_one() -> None:
    """Its step may take 1.6 times 20 ms, so 24 streams at half a millisecond; bulk alone may have 40."""
    beside = [waiting(f"w{i:02}", "bulk", prompt=2) for i in range(60)]
    of = replace(view(*beside, loss=lambda state: 8.5), kept=lambda state: 2)
    assert 38 <= len(started(of)) <= 41
    assert 32 <= len(started(replace(of, recompute_tokens=85.0))) <= 35, "ten more, which lose half a block each"
    assert 22 <= len(started(replace(of, recompute_tokens=-1.0))) <= 25
    assert 22 <= len(started(replace(of, loss=lambda state: NEVER_S))) <= 25
    assert 27 <= len(started(replace(of, loss=lambda state: 200.0, recompute_tokens=1000.0))) <= 30, "five are paid for"
    there = view(waiting("chat"), *decodes(40), left_s=0.0)
    assert started(there) == ["chat"] and 14 <= len(hung_up(there)) <= 20, "none of them delays its first token"


def test_prompts_and_streams_of_bulk_alone_share_the_step_that_a_chat_may_wait_for() -> None:
    def parts(num_streams: int, alone_s: float = 0.1) -> dict[str, int]:
        long = [waiting(f"long{i}", "bulk", prompt=300) for i in range(2)]
        of = view(*long, *decodes(num_streams), may_cut=lambda state: True, loss=lambda state: 8.5)
        budgets = {name: replace(budget, alone_s=alone_s) for name, budget in of.budgets.tiers.items()}
        return dict(decide(replace(of, budgets=replace(of.budgets, tiers=budgets)), 0.0).parts)

    assert parts(1) == {"long0": 64} and parts(40) == {"long0": 48}
    assert parts(40, alone_s=0.041) == {"long0": 16}, "the streams take all of it, and prompts must go on"


def test_prompts_of_bulk_that_the_server_has_not_begun_are_recalled_for_a_chat() -> None:
    prompts = [at_server(name, "bulk", prompt=100) for name in ("old", "new")]
    of = view(waiting("chat"), *prompts, *decodes(2), is_unbegun=lambda state: state.id == "new")
    assert hung_up(replace(of, recompute_tokens=0.0)) == ["new"], "nothing of it is computed again"
    assert hung_up(replace(of, is_unbegun=lambda state: False)) == []
    assert hung_up(view(*prompts, is_unbegun=lambda state: True)) == []


def test_a_chat_does_not_wait_for_bulks_prompts_which_the_server_has_already() -> None:
    beside = [at_server(f"p{i}", "bulk", prompt=500) for i in range(10)]
    assert started(view(waiting("chat"), *beside)) == ["chat"]
    continued = view(waiting("w", "bulk"), *beside, traffic=False)
    assert started(continued) == [] and started(replace(continued, kept=lambda state: 499 * (state.id != "w"))) == ["w"]


def test_bulk_lengthens_a_step_only_so_far() -> None:
    beside = [waiting(f"w{i}", "bulk", prompt=2) for i in range(40)]
    with_traffic = started(replace(view(*beside, make_decode("chat", "realtime")), kept=lambda state: 2))
    assert 20 <= len(with_traffic) <= 26, "0.6 of 20 ms, at half a millisecond a stream"
    assert len(started(view(*beside, traffic=False))) == 40


def test_without_max_slowdown_the_slo_alone_limits_a_step() -> None:
    beside = [waiting(f"w{i:03}", "bulk", prompt=2) for i in range(400)]
    slow = make_tiers(realtime={"max_slowdown": None, "slo": {"ttft_p99_ms": 200, "itl_p99_ms": 90}})
    of = view(*beside, make_decode("chat", "realtime"), tiers=slow)
    of = replace(of, budgets=_roomy(of), kept=lambda state: 2)
    assert 50 <= len(started(of)) <= 60, "a quarter of 200 ms, and not 90 ms"


def test_a_prefill_must_fit_into_what_the_answers_under_way_have_left() -> None:
    of = view(waiting("w", "bulk", prompt=30), make_decode("chat", "realtime"), *decodes(2))
    assert started(replace(of, left_s=0.05)) == ["w"]
    assert started(replace(of, left_s=0.02)) == started(replace(of, left_s=-1.0)) == []
    assert started(replace(of, left_s=0.02, kept=lambda state: 16)) == ["w"], "its prefix is cached"
    assert started(replace(of, left_s=0.01, kept=lambda state: 16)) == [], "what is left of it takes 14 ms"


def _roomy(of: View) -> Budgets:
    budgets = of.budgets
    return replace(budgets, tiers={name: replace(b, max_num_seqs=400) for name, b in budgets.tiers.items()})


def test_the_servers_places_are_not_exceeded_and_some_are_left_for_chats() -> None:
    short = [waiting(f"w{i}", "bulk", prompt=2) for i in range(20)]
    quiet = view(*short, traffic=False, max_in_flight=8)
    assert len(started(replace(quiet, loss=lambda state: 8.5))) == 8
    assert len(started(quiet)) == 6, "what is hung up would be computed again"
    assert len(started(replace(view(*short, max_in_flight=8), loss=lambda state: 8.5))) == 6
    assert len(started(view(*(waiting(f"c{i}") for i in range(20)), max_in_flight=8))) == 8


def test_bulk_starts_slowly_unless_it_shows_no_decodes() -> None:
    short = [waiting(f"w{i}", "bulk", prompt=2) for i in range(20)]
    assert len(started(view(*short, traffic=False, slow_start=4))) == 4
    assert len(started(view(*(waiting(f"c{i}") for i in range(20)), slow_start=4))) == 20
    vectors = [waiting(f"w{i}", "bulk", prompt=2, max_tokens=1) for i in range(20)]
    assert len(started(view(*vectors, traffic=False, slow_start=4))) == 20


def test_a_chat_without_a_place_gets_that_of_bulk() -> None:
    of = view(waiting("a"), waiting("z", "bulk"), *decodes(8), max_in_flight=8)
    assert hung_up(of) == ["b00"] or hung_up(of) == ["b00", "b01"]
    assert started(of) == [], "the place is free only after the hang-up"
    assert hung_up(replace(of, recompute_tokens=5)) == [], "the budget is spent"
    assert hung_up(replace(of, hang_up_from_s=1.0)) == [], "the last hang-ups have not taken effect"
    assert hung_up(replace(of, evictable=[])) == []
    due = {**of.budgets.tiers, "bulk": replace(of.budgets.tiers["bulk"], min_share=0.5)}
    assert hung_up(replace(of, budgets=replace(of.budgets, tiers=due))) == [], "it is bulk's min share"


def test_bulk_is_hung_up_for_a_first_token_that_would_be_late() -> None:
    of = view(at_server("a", claimed_s=0.0), *decodes(40))
    assert hung_up(of, now=0.05) == []
    victims = hung_up(of, now=0.45)
    assert victims and victims == [f"b{i:02}" for i in range(len(victims))], "in the given order"
    assert len(victims) < 20, "until a step is as short as traffic allows"


def test_bulk_is_hung_up_where_an_answer_is_delayed_too_much_by_more_streams_than_may_run() -> None:
    of = view(make_decode("chat", "realtime"), *decodes(40))
    assert hung_up(replace(of, left_s=0.001)) == [], "it may be delayed further"
    victims = hung_up(replace(of, left_s=-0.01))
    assert victims == [f"b{i:02}" for i in range(len(victims))] and 14 <= len(victims) <= 20, "24 may stay"
    few = view(make_decode("chat", "realtime"), waiting("w", "bulk", prompt=9), *decodes(20), left_s=-0.01)
    assert hung_up(few) == [] and started(few) == [], "the rest may stay, but nothing is added"
    assert hung_up(replace(of, left_s=-0.01, recompute_tokens=100)) == victims[:3], "the budget is spent"
    kept = {"lost": lambda state: 1, "recompute_tokens": 100}
    assert hung_up(replace(of, left_s=-0.01, **kept)) == victims, "what is cached is not computed again"


def yielding(*states: RequestState) -> list[RequestState]:
    for state in states:
        state.yields = True
    return list(states)


def test_what_yields_is_sent_and_hung_up_as_bulk_is_and_goes_before_it() -> None:
    late = yielding(*(waiting(f"y{i}", prompt=200) for i in range(3)))
    beside = [waiting("chat"), *late, waiting("w", "bulk", prompt=200)]
    assert started(_with_yielding(view(*beside, *decodes(2)))) == ["chat"]
    assert started(_with_yielding(view(*late, waiting("w", "bulk"), make_decode("chat", "realtime")))) == ["y0"]
    running = yielding(*(make_decode(f"y{i}", "realtime") for i in range(8)))
    of = _with_yielding(view(waiting("chat"), *running, *decodes(2), max_in_flight=10))
    assert hung_up(replace(of, evictable=[*decodes(1), *running])) == ["b00"], "bulk first"
    assert hung_up(replace(of, evictable=running)) == ["y0"]
    alone = view(waiting("c"), *running, max_in_flight=8, evictable=[])
    assert started(alone) == [] and started(replace(alone, max_in_flight=9)) == ["c"]


def test_what_yields_takes_no_slot_of_its_tier_from_others() -> None:
    flood = [make_decode(f"y{i}", "realtime") for i in range(64)]
    of = view(waiting("chat"), *flood)
    assert started(of) == []
    of.table.set_yielding([state.id for state in flood])
    assert started(_with_yielding(of)) == ["chat"]


def test_prompts_that_yield_are_in_nobodys_way() -> None:
    beside = yielding(*(at_server(f"y{i}", prompt=500) for i in range(10)))
    assert started(_with_yielding(view(waiting("chat"), *beside))) == ["chat"]


def test_streams_that_yield_do_not_make_a_step_of_others_longer() -> None:
    short = yielding(*(waiting(f"w{i:02}", prompt=2) for i in range(40)))
    running = yielding(*(make_decode(f"y{i:02}", "realtime") for i in range(20)))
    of = _with_yielding(replace(view(*short, *running, make_decode("chat", "realtime")), kept=lambda state: 1))
    assert len(started(of)) <= 6, "with the 20 that run, 0.6 of the 20 ms that the chat's step takes alone"


def _with_yielding(of: View, **changes: Any) -> View:
    budgets = {name: replace(budget, **changes) for name, budget in of.budgets.tiers.items()}
    return replace(of, budgets=replace(of.budgets, yielding=budgets))


def test_beside_chats_a_long_prompt_is_sent_in_parts_where_the_server_keeps_them() -> None:
    """A chat may wait for 60 ms of it, so 60 tokens; the next part goes before the server has begun the first one."""

    def parts(*states: RequestState, **changes: Any) -> dict[str, int]:
        of = view(*states, **{"may_cut": lambda state: True, "left_s": 0.2} | changes)
        budgets = {**of.budgets.tiers, "bulk": replace(of.budgets.tiers["bulk"], beside_s=COST.step_s + 0.06)}
        return dict(decide(replace(of, budgets=replace(of.budgets, tiers=budgets)), 0.0).parts)

    chat, long = make_decode("chat", "realtime"), waiting("long", "bulk", prompt=300)
    assert parts(chat, long) == {"long": 48}
    assert parts(chat, long, kept=lambda state: 48 * (state is long)) == {"long": 96}
    assert parts(chat, waiting("short", "bulk", prompt=60)) == {}
    assert parts(chat, long, may_cut=lambda state: False) == {}
    assert parts(chat, long, left_s=0.035) == {"long": 32}, "the accounts of the answers have no more"
    assert parts(long, traffic=False) == {}, "nobody can be delayed"
    assert parts(chat, *(waiting(name, "bulk", prompt=300) for name in ("l1", "l2"))) == {"l1": 48}
