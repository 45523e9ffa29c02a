"""Bulk prompts that begin alike: the beginning is computed once, and the others take only the rest from the budget."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.planning.prompt_prefixes import PromptPrefixes
from scheduler.request import Request
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import FAST, fixed, make_core, make_info, make_request, make_state, make_tiers
from tests.scheduler.stepped_core import SteppedCore

BLOCK = 16
SHARED = 6 * BLOCK
INFO = make_info(caches_prefixes=True)
FREE_PREFILL = replace(FAST, prefill_token_s=1e-7)
EXAMPLES = tuple(range(10, 10 + SHARED))


def asking(number: int, tier: str = "bulk", beginning: tuple[int, ...] = EXAMPLES, **changes: Any) -> Request:
    """Return a request with a beginning that it shares, and 20 tokens of its own."""
    prompt = beginning + tuple(200 + (number * 7 + i) % 100 for i in range(20))
    return make_request(f"q{number}", tier, prompt, deadline_ms=EPOCH_MS + 10_000 + number, **changes)


def stepped(*, caches: bool = True, **info: Any) -> SteppedCore:
    """Return a core whose bulk steps are long enough for all requests of a test, and its engine."""
    tiers = make_tiers(bulk={"batch_size": fixed(64), "batch_tokens": fixed(4096)})
    core = make_core(tiers, replace(INFO, caches_prefixes=caches, **info), cost=FREE_PREFILL)
    return SteppedCore(core, FREE_PREFILL, prefix_cache=caches)


def cached(world: SteppedCore) -> int:
    """Return the number of prompt tokens that were found in the prefix cache, over all requests."""
    found: dict[str, int] = {}
    for event in world.events:
        found[event.request_id] = max(found.get(event.request_id, 0), event.cached_tokens)
    return sum(found.values())


def test_a_shared_beginning_is_computed_once() -> None:
    world = stepped()
    requests = [asking(number) for number in range(5)]
    world.accept(*requests)
    first, second = world.step(), world.step()
    assert [run.seq_id for run in first.run] == ["q0"], "the others would compute the same examples again"
    started = {run.seq_id: run.num_tokens for run in second.run}
    assert started == {"q0": 1, "q1": 20, "q2": 20, "q3": 20, "q4": 20}, "and they take only what is theirs"
    world.run()
    assert cached(world) == 4 * SHARED


def test_the_others_wait_for_a_long_beginning_until_it_is_computed_in_chunks() -> None:
    world = stepped(max_step_tokens=32)
    world.accept(asking(0), asking(1))
    plans = [world.step() for _ in range(5)]
    runs = [[run.seq_id for run in plan.run] for plan in plans]
    assert runs[:3] == [["q0"]] * 3, "q1 shares all six blocks"
    assert "q1" in [seq_id for run in runs[3:] for seq_id in run]
    world.run()
    assert cached(world) == SHARED


def test_a_wrong_hint_costs_a_step_and_nothing_else() -> None:
    """The plan says that the cache holds a beginning which the engine has given to others meanwhile."""
    told = SteppedCore(make_core(info=INFO), prefix_cache=False)
    told.accept(*(asking(number) for number in range(4)))
    told.run()
    world = stepped(caches=False)
    world.accept(*(asking(number) for number in range(4)))
    world.run()
    for number in range(4):
        assert told.tokens(f"q{number}") == world.tokens(f"q{number}") != []


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=12),
    st.sampled_from([24, 40, 200]),
    st.booleans(),
)
def test_whatever_begins_alike_every_request_gets_its_tokens(
    lines: list[tuple[int, int, int]], num_blocks: int, caches: bool
) -> None:
    requests = [
        asking(number, beginning=tuple(range(100 * which, 100 * which + BLOCK * blocks)), max_tokens=max_tokens)
        for number, (which, blocks, max_tokens) in enumerate(lines)
    ]
    world = stepped(caches=caches, num_blocks=num_blocks, max_step_tokens=64)
    world.accept(*requests)
    world.run()
    assert [len(world.tokens(request.id)) for request in requests] == [max_tokens for *_, max_tokens in lines]


def test_the_memory_of_prefixes_is_bounded() -> None:
    prefixes = PromptPrefixes(replace(INFO, num_blocks=10))
    for number in range(20):
        state = make_state(f"{number}", "bulk", prompt=range(100 * number, 100 * number + 5 * BLOCK))
        prefixes.note(state, 5 * BLOCK)
    newest, older = (make_state("x", "bulk", prompt=range(100 * n, 100 * n + 5 * BLOCK)) for n in (19, 12))
    assert prefixes.lookup(newest, ()) == (4 * BLOCK, False)
    assert prefixes.lookup(older, ()) == (0, False)
