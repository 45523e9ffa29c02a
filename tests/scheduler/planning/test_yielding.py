"""Which interactive requests yield: to higher tiers, and to keys that have used less."""

import asyncio

from scheduler.holdings.request_table import RequestTable
from scheduler.planning.yielding import MAX_OWED_S, Yielding
from scheduler.request import OWN_REQUESTS
from scheduler.request_state import RequestState
from tests.scheduler.builders import FAST, make_state, make_tiers, ran
from tests.scheduler.world import World, run_world

TIERS = make_tiers(gold={"priority": 200, "slo": {"ttft_p99_ms": 300}})


def of_key(owner: str, count: int, tier: str = "realtime", weight: int = 1) -> list[RequestState]:
    return [make_state(f"{tier}-{owner}{i}", tier, tiers=TIERS, owner=owner, weight=weight) for i in range(count)]


def find(yielding: Yielding, *states: RequestState) -> set[str]:
    table = RequestTable(TIERS.by_priority)
    for state in states:
        table.update(state)
    return yielding.find(TIERS.by_priority, table)


def test_a_lower_tier_yields_to_a_higher_one() -> None:
    silver = of_key("a", 2)
    assert find(Yielding(), *silver, *of_key("a", 1, "gold")) == {s.id for s in silver}
    assert find(Yielding(), *silver) == set()


def test_one_key_alone_gets_all() -> None:
    yielding, states = Yielding(), of_key("a", 20)
    yielding.charge(states[0], 100.0)
    assert find(yielding, *states) == set()


def test_a_key_with_more_than_a_few_requests_yields_with_all() -> None:
    yielding, flood = Yielding(), of_key("a", OWN_REQUESTS + 1)
    yielding.charge(flood[0], 1.0)
    assert find(yielding, *flood, *of_key("b", 1)) == {s.id for s in flood}
    assert find(yielding, *flood[:OWN_REQUESTS], *of_key("b", 1)) == set()


def test_what_a_key_has_used_more_makes_it_yield() -> None:
    yielding, a, b = Yielding(), of_key("a", OWN_REQUESTS + 1), of_key("b", OWN_REQUESTS + 1)
    yielding.charge(a[0], 1.0)
    assert find(yielding, *a, *b) == {s.id for s in a}
    yielding.charge(b[0], MAX_OWED_S + 0.5)
    assert find(yielding, *a, *b) == {s.id for s in b}


def test_a_key_is_owed_no_more_than_a_long_answer() -> None:
    yielding, a, b = Yielding(), of_key("a", OWN_REQUESTS + 1), of_key("b", OWN_REQUESTS + 1)
    yielding.charge(a[0], 1000.0)
    assert find(yielding, *a, *b) == {s.id for s in a}
    yielding.charge(b[0], MAX_OWED_S + 0.1)
    assert find(yielding, *a, *b) == {s.id for s in b}


def test_a_new_flood_goes_before_no_key_with_few_requests_that_was_there_before() -> None:
    """It was owed ten seconds at once, and the chats that came took twice as long as alone."""
    yielding, chat, flood = Yielding(), of_key("a", 1), of_key("b", OWN_REQUESTS + 1)
    yielding.charge(chat[0], 1.0)
    assert find(yielding, *chat, *flood) == {s.id for s in flood}


def test_nobody_saves_up_however_long_another_one_has_used_the_engine_alone() -> None:
    """A chat goes first until it has used ten seconds more than a flood, and starts at most twenty behind it."""
    yielding, chat, flood = Yielding(), of_key("a", 1), of_key("b", OWN_REQUESTS + 1)
    yielding.charge(chat[0], 1.0)
    yielding.charge(flood[0], 1000.0)
    assert find(yielding, *chat, *flood) == {s.id for s in flood}
    yielding.charge(chat[0], 3 * MAX_OWED_S - 0.1)
    assert find(yielding, *chat, *flood) == {s.id for s in flood}
    yielding.charge(chat[0], 0.2)
    assert find(yielding, *chat, *flood) == set()


def test_a_new_chat_begins_with_what_a_flood_has_used() -> None:
    yielding, chat, flood = Yielding(), of_key("a", 1), of_key("b", OWN_REQUESTS + 1)
    yielding.charge(flood[0], 1000.0)
    assert find(yielding, *chat, *flood) == {s.id for s in flood}
    yielding.charge(chat[0], MAX_OWED_S + 0.1)
    assert find(yielding, *chat, *flood) == set()


def test_what_a_key_has_used_counts_by_its_weight() -> None:
    yielding, a, b = Yielding(), of_key("a", OWN_REQUESTS + 1, weight=3), of_key("b", OWN_REQUESTS + 1)
    yielding.charge(a[0], 0.9)
    yielding.charge(b[0], 0.4)
    assert find(yielding, *a, *b) == {s.id for s in b}
    yielding.charge(a[0], 0.4)
    assert find(yielding, *a, *b) == {s.id for s in a}


def test_a_key_that_is_expected_counts_as_there() -> None:
    """A driver that cannot leave a flood out of a step looks ahead."""
    flood, table = of_key("a", OWN_REQUESTS + 1), RequestTable(TIERS.by_priority)
    for state in flood:
        table.update(state)
    for spared in (0, OWN_REQUESTS):
        yielding, expected = Yielding(spared), {state.id for state in flood[spared:]}
        yielding.charge(flood[0], 1.0)
        assert yielding.find(TIERS.by_priority, table, {"realtime": ["a"]}) == set()
        assert yielding.find(TIERS.by_priority, table, {"realtime": ["a", "b"]}) == expected
        assert yielding.find(TIERS.by_priority, table, {"gold": ["b"]}) == expected


def test_a_request_that_yields_runs_without_limits_of_steps_too() -> None:
    """A tier whose steps are not limited (`feed_forward: false`) leaves those of a flood what others leave."""

    async def story(world: World) -> None:
        flood = [asyncio.create_task(world.ask(f"a{i}", max_tokens=60, owner="a")) for i in range(10)]
        await world.clock.sleep(0.1)
        other = asyncio.create_task(world.ask("b", max_tokens=200, owner="b"))
        await world.clock.sleep(0.1)
        yielding = [state.id for state in world.core.held.table if state.yields]
        assert yielding and set(yielding) <= set(ran(world.core.plans[-1][1]))
        await asyncio.gather(*flood, other)

    tiers = make_tiers()
    switches = tiers.controller.model_copy(update={"feed_forward": False})
    run_world(story, known=FAST, tiers=tiers.model_copy(update={"controller": switches}))
