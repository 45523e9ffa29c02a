"""Which steps have drafts, of which tokens, and how many of them."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import Run, StepPlan
from engine.step_time.cost import StepCost, StepWork
from scheduler.planning.kv_budget import EngineView
from scheduler.planning.speculation import LONGEST_DRAFT, USUAL_RATE, Repetition, Speculation
from scheduler.request_state import RequestState, Status
from tests.scheduler.builders import FAST, expected_tokens, make_core, make_info, make_request, make_tiers
from tests.scheduler.stepped_core import SteppedCore
from tests.scheduler.world import World, run_world

PERIOD = 6
SPECULATING = make_info(verifies_drafts=True)
DEAR = replace(FAST, decode_s=FAST.step_s)  # a step of two decodes takes nearly twice as long as one of one


def state_of(
    prompt: Sequence[int], output: Sequence[int] = (), tier: str = "realtime", **sampling: Any
) -> RequestState:
    request = make_request(tier=tier, prompt=prompt, **{"max_tokens": 100, **sampling})
    state = RequestState(request, make_tiers().tiers[tier], 1, 0.0, 0.0)
    state.output_token_ids.extend(output)
    return state


# -- the draft of a sequence -------------------------------------------------------------------------------------------


def test_a_draft_is_what_came_after_the_newest_tokens_the_last_time() -> None:
    state = state_of([1, 2, 3, 40, 41, 1, 2, 3, 50, 51, 52, 9], [1, 2, 3])
    assert Repetition().draft(state, 2) == (50, 51)


def test_a_longer_beginning_in_common_counts_for_more_than_a_later_one() -> None:
    context = list(range(10, 20))
    state = state_of([*context, 40, 41, 42, 7, *context[-3:], 50, 51], context)
    assert Repetition().draft(state, 3) == (40, 41, 42)


def test_a_text_that_goes_round_goes_on_going_round() -> None:
    assert Repetition().draft(state_of([7, 1, 2, 3, 1, 2, 3]), 7) == (1, 2, 3, 1, 2, 3, 1)
    assert Repetition().draft(state_of([5, 5, 5, 5]), 3) == (5, 5, 5)


def test_what_has_not_occurred_before_has_no_draft() -> None:
    for tokens in ([1], [1, 1], [1, 2, 3], [1, 2, 3, 4, 5, 9, 4, 6]):
        assert Repetition().draft(state_of(tokens), 5) == ()


@given(st.lists(st.integers(0, 2), min_size=4, max_size=40), st.integers(1, 38), st.integers(1, 20))
def test_the_text_is_known_however_it_grows(tokens: list[int], num_prompt: int, longest: int) -> None:
    num_prompt = min(num_prompt, len(tokens) - 1)
    state, grown = state_of(tokens[:num_prompt]), Repetition()
    for token_id in tokens[num_prompt:]:
        grown.draft(state, longest)
        state.output_token_ids.append(token_id)
    found = grown.draft(state, longest)
    assert found == Repetition().draft(state, longest) == Repetition().draft(state_of(tokens), longest)
    assert len(found) in (0, longest)
    text = (*tokens, *found)
    if found:  # the draft continues as the text did behind an equal place before
        ends = [i for i in range(2, len(tokens)) if tuple(tokens[i - 2 : i]) == tuple(tokens[-2:])]
        assert any(all(text[i + k] == found[k] for k in range(longest)) for i in ends)


def test_large_token_ids_and_surrogates_are_tokens_like_others() -> None:
    ids = [0xD800, 0xDFFF, 262_143, 0, 128_255]
    assert Repetition().draft(state_of([*ids, *ids]), 5) == tuple(ids)


# -- what is worth drafting --------------------------------------------------------------------------------------------


def view(**changes: Any) -> EngineView:
    return replace(EngineView(400, 400, 16, 1024, 512), **changes)


def drafts(
    *states: RequestState,
    cost: StepCost = FAST,
    limit_s: float = 1.0,
    speculation: Speculation | None = None,
    returning: Collection[RequestState] = (),
    prefilling: Collection[RequestState] = (),
    mixed_cost: StepCost | None = None,
    **capacity: Any,
) -> list[int]:
    """Return the lengths of the drafts in a step of these decodes. Those that are `returning` were swapped.

    Those that are `prefilling` compute all of their tokens instead."""
    core = make_core(info=SPECULATING)
    for i, state in enumerate(states):
        state.id = f"s{i}"
        state._status = Status.SWAPPED if state in returning else Status.RUNNING
        state.num_computed_tokens = 0 if state in prefilling else state.num_tokens - 1
        core.held.table.update(state)
    plan = StepPlan(0, run=tuple(Run(state.id, state.num_uncomputed) for state in states))
    found = (speculation or Speculation()).with_drafts(
        plan, core.held.table, view(**capacity), cost, mixed_cost or cost, {"realtime": limit_s}
    )
    assert [run.seq_id for run in found.run] == [run.seq_id for run in plan.run]
    return [len(run.draft) for run in found.run]


def repeating(**sampling: Any) -> RequestState:
    return state_of([1, 2, 3] * 4, [1, 2, 3], **sampling)


def plain() -> RequestState:
    return state_of(range(30, 60), [5, 6])


def taught(state: RequestState, rate: float) -> Speculation:
    speculation = Speculation()
    speculation._known[state] = Repetition()
    speculation._known[state].rate = rate
    return speculation


def test_a_draft_is_as_long_as_it_pays() -> None:
    state = repeating()
    lengths = [drafts(state, speculation=taught(state, rate))[0] for rate in (0.02, 0.2, 0.5, 0.8, 0.99)]
    assert lengths[0] == 0 and lengths[-1] == LONGEST_DRAFT
    assert lengths == sorted(lengths) and len(set(lengths)) == 5
    # With a rate of 0.5 and costs in the ratio of 10.5 to 0.5: the expected tokens a second are the most possible.
    expected = [sum(0.5**k for k in range(n + 1)) / (0.0105 + 0.0005 * n) for n in range(9)]
    assert abs(lengths[2] - expected.index(max(expected))) <= 1
    assert drafts(repeating(), cost=DEAR) == [0]
    assert drafts(repeating(), cost=StepCost(0.0, 0.0, 0.0, 0.0, 0.0)) == [0], "no cost is known yet"


def test_others_are_not_slowed_down_for_one_that_repeats_itself() -> None:
    alone = drafts(repeating())[0]
    beside = drafts(repeating(), *(plain() for _ in range(7)))
    assert 0 < beside[0] < alone and beside[1:] == [0] * 7
    assert drafts(repeating(), *(plain() for _ in range(63)))[0] == 0


def test_many_that_repeat_themselves_share_the_time() -> None:
    lengths = drafts(*(repeating() for _ in range(8)))
    assert max(lengths) - min(lengths) <= 1 and 0 < max(lengths) <= drafts(repeating())[0]


def test_bulk_counts_for_what_fits_and_not_for_what_drafts_are_worth() -> None:
    def beside(num_bulk: int, limit_s: float = 1.0) -> list[int]:
        bulk = (state_of(range(30, 60), [5, 6], "bulk") for _ in range(num_bulk))
        return drafts(repeating(), *bulk, limit_s=limit_s)

    (alone,) = beside(0)
    assert beside(60) == [alone, *[0] * 60] and alone > 2
    work = StepWork()
    for context in (14, *[31] * 60):
        work.add(1, context)
    assert beside(60, FAST.of(work) + 2.5 * FAST.decode(14))[0] == 2
    slow = replace(FAST, prefill_token_s=0.01)  # 32 tokens beside: 0.32 s, known only of steps with prefills
    for limit_s, expected in ((0.3, 0), (0.5, alone)):
        prefill = state_of(range(30, 60), [5, 6], "bulk")
        with_prefill = drafts(repeating(), prefill, prefilling=[prefill], mixed_cost=slow, limit_s=limit_s)
        assert with_prefill == [expected, 0]
    back = state_of(range(30, 60), [5, 6], "bulk")  # with 32 tokens in 16 blocks
    assert [drafts(repeating(), back, returning=[back], block_size=2, free_blocks=n)[0] for n in (16, 17, 18)] == [
        0,
        1,
        3,
    ]


def test_a_draft_leaves_room_for_the_token_after_it() -> None:
    def longest(**more: Any) -> int:
        state = more.pop("state", None) or repeating(**more.pop("sampling", {}))
        return drafts(state, speculation=taught(state, 0.999), **more)[0]

    assert longest() == LONGEST_DRAFT
    assert longest(sampling={"max_tokens": 8}) == 4  # after 3 of them
    assert longest(sampling={"max_tokens": 4}) == 0
    assert longest(max_model_len=20) == 4  # after 15
    assert longest(max_step_tokens=6) == 5
    assert longest(free_blocks=0) == 1  # 14 tokens are computed of 16 in its block
    assert longest(free_blocks=0, block_size=2) == 0
    assert longest(free_blocks=2, block_size=2) == 3
    assert longest(limit_s=FAST.step_s + FAST.decode(14) * 3.5) == 2
    assert longest(sampling={"frequency_penalty": 0.5}) == 0


def test_a_text_that_does_not_repeat_itself_is_left_alone_and_tried_again_rarely() -> None:
    known = Repetition()
    for _ in range(12):
        known.note(1, 0)
    stopped = known.rate
    assert stopped < 0.2
    for _ in range(10):
        known.note(0, 0)
    assert stopped < known.rate < 0.2
    for _ in range(1000):
        known.note(0, 0)
    assert known.rate == pytest.approx(USUAL_RATE, abs=1e-3)
    known.note(8, 3)  # four of them say something: the fourth was wrong, and those after it were not looked at
    again = Repetition()
    again.rate = USUAL_RATE
    for accepted in (1, 1, 1, 0):
        again.note(1, accepted)
    assert known.rate == pytest.approx(again.rate, abs=1e-2)


# -- in a core, stepped by hand ----------------------------------------------------------------------------------------


def stepped(**changes: Any) -> SteppedCore:
    core = make_core(make_tiers(**changes), SPECULATING)
    return SteppedCore(core, period=PERIOD)


def ask(request_id: str, tier: str = "realtime", max_tokens: int = 60, **more: Any) -> Any:
    return make_request(request_id, tier, 8, max_tokens, **more)


def test_an_answer_that_repeats_itself_takes_fewer_steps_and_is_the_same() -> None:
    stand, request = stepped(), ask("a")
    stand.accept(request)
    stand.run()
    tokens = [token_id for event in stand.events for token_id in event.token_ids]
    assert tokens == expected_tokens(request, PERIOD)
    assert len(stand.reports) < 30, "of 60 tokens"
    assert sum(report.tokens["realtime"] for report in stand.reports) == 60
    uses = [use for report in stand.reports for use in report.drafts]
    assert 30 < sum(use.num_accepted for use in uses) <= sum(use.num_drafted for use in uses)


def test_drafts_grow_as_the_core_learns_that_they_are_right() -> None:
    stand = stepped()
    stand.accept(ask("a", max_tokens=200))
    lengths = []
    while "a" in stand.core._states and stand.core._states["a"].num_tokens < 170:
        lengths.append(len(stand.step().run[0].draft))
    first = next(length for length in lengths if length)
    assert first < LONGEST_DRAFT == lengths[-1]


def test_drafted_tokens_are_work_whether_they_are_right_or_not() -> None:
    stand = stepped()
    stand.accept(ask("a"))
    for _ in range(20):
        plan = stand.submit()
        before = stand.core._states["a"].num_computed_tokens if "a" in stand.core._states else 0
        own_s = stand.core._states["a"].own_s
        report = stand.collect()
        if plan.run[0].draft:
            break
    count = 1 + len(plan.run[0].draft)
    assert report.work is not None and count > 2
    assert (report.work.decodes, report.work.prefills) == (count, 0)
    assert report.work.context_tokens == sum(before + i for i in range(count))
    assert report.elapsed_s == pytest.approx(FAST.of(report.work))
    assert report.planned_s == pytest.approx(report.elapsed_s)
    assert stand.core._states["a"].own_s - own_s == pytest.approx(FAST.runs(report.work), rel=0.2)


def test_bulk_has_no_drafts_and_takes_none_from_others() -> None:
    stand = stepped()
    stand.accept(ask("a", max_tokens=200))
    for _ in range(12):
        stand.step()
    assert stand.core.plans[-1][1].run[0].draft
    stand.accept(ask("b", "bulk", max_tokens=40))
    plans = [stand.step() for _ in range(6)]
    beside = [run for plan in plans for run in plan.run if run.seq_id == "a"]
    assert len(beside) == 6 and all(run.draft for run in beside)
    bulk = [run for plan in plans for run in plan.run if run.seq_id == "b"]
    assert bulk and not any(run.draft for run in bulk)


def test_no_step_has_drafts_while_an_interactive_request_awaits_its_first_token() -> None:
    stand = stepped()
    stand.accept(ask("a", max_tokens=200))
    for _ in range(12):
        stand.step()
    stand.accept(ask("b"))
    plan = stand.step()
    assert len(plan.run) == 2 and not any(run.draft for run in plan.run)


def test_what_yields_has_no_drafts() -> None:
    stand = stepped(gold={"priority": 300, "service_tiers": ["gold"], "slo": {"ttft_p99_ms": 500, "itl_p99_ms": 100}})
    stand.accept(ask("a", max_tokens=200))
    for _ in range(12):
        stand.step()
    stand.accept(ask("g", "gold", max_tokens=60))
    stand.step()
    runs = []
    while "g" in stand.core._states:
        runs += stand.step().run
    assert any(run.draft for run in runs if run.seq_id == "g")
    assert not any(run.draft for run in runs if run.seq_id == "a")


def test_an_engine_that_verifies_no_drafts_gets_none() -> None:
    stand = SteppedCore(make_core(), period=PERIOD)
    stand.accept(ask("a"))
    stand.run()
    assert not any(run.draft for _, plan in stand.core.plans for run in plan.run)


@pytest.mark.parametrize("num_blocks", [13, 40])
def test_drafts_leave_the_blocks_that_are_reserved(num_blocks: int) -> None:
    """A sequence that was preempted too often may have 208 tokens, which need 13 blocks."""
    stand = SteppedCore(make_core(make_tiers(), replace(SPECULATING, num_blocks=num_blocks)), period=PERIOD)
    stand.accept(ask("a", max_tokens=200))
    for _ in range(12):
        stand.step()
    state = stand.core._states["a"]
    state.num_preemptions = state.tier.retry.max_preemptions
    stand.core.held.table.reconfigure({tier.name: tier for tier in stand.core.held.tiers})
    num_computed = state.num_computed_tokens
    drafted = len(stand.step().run[0].draft)
    left = -(num_computed + 1) % 16  # slots in the sequence's last block
    assert drafted == left if num_blocks == 13 else drafted > left


# -- in virtual time ---------------------------------------------------------------------------------------------------


def chats_s(*, beside_bulk: bool) -> float:
    """Return the time that ten chats in a row take, of which each repeats itself."""

    async def story(world: World) -> float:
        bulk = [world.ask(f"bulk-{i}", "bulk", 40, 2000 * beside_bulk + 1) for i in range(8)]
        backlog = asyncio.gather(*bulk, return_exceptions=True)
        await world.clock.sleep(2.0)
        begun_s = world.clock.now()
        for i in range(10):
            answer = await world.ask(f"chat-{i}", "realtime", 20, 120)
            assert answer.token_ids == expected_tokens(answer.request, PERIOD)
        taken_s = world.clock.now() - begun_s
        drafted = [run for _, plan in world.core.plans for run in plan.run if run.draft]
        assert drafted and all(run.seq_id.startswith("chat") for run in drafted)
        assert backlog.done() is not beside_bulk
        await backlog
        return taken_s

    info = make_info(verifies_drafts=True, suspends_steps=True)
    return run_world(story, tiers=make_tiers(realtime={"max_slowdown": 1.25}), info=info, noise=0.1, period=PERIOD)


def test_answers_with_drafts_take_as_long_beside_bulk_as_promised() -> None:
    """`max_slowdown` compares with what they take alone, where they have drafts."""
    assert chats_s(beside_bulk=True) == pytest.approx(1.25 * chats_s(beside_bulk=False), rel=0.1)


def test_metrics_count_drafts_and_what_of_them_was_right() -> None:
    async def story(world: World) -> World:
        for i in range(6):
            await world.ask(f"chat-{i}", "realtime", 20, 60)
        return world

    world = run_world(story, info=make_info(verifies_drafts=True), noise=0.1, period=PERIOD)
    value = world.prometheus.get_sample_value
    counts = {
        name: value(f"tidegate_{name}_total", {"tier": "realtime"})
        for name in ("generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    }
    assert counts["generation_tokens"] == 360
    assert 0 < counts["spec_decode_num_accepted_tokens"] <= counts["spec_decode_num_draft_tokens"]  # type: ignore[operator]


def test_drafts_make_answers_faster_by_more_than_half_and_cost_nothing_where_nothing_repeats() -> None:
    def seconds(period: int, *, verifies_drafts: bool) -> float:
        async def story(world: World) -> float:
            begun_s = world.clock.now()
            await asyncio.gather(*(world.ask(f"chat-{i}", "realtime", 20, 150) for i in range(3)))
            return world.clock.now() - begun_s

        return run_world(story, info=make_info(verifies_drafts=verifies_drafts), period=period)

    assert seconds(PERIOD, verifies_drafts=False) > 1.5 * seconds(PERIOD, verifies_drafts=True)
    never = 1 << 60
    assert seconds(never, verifies_drafts=False) == pytest.approx(seconds(never, verifies_drafts=True))
