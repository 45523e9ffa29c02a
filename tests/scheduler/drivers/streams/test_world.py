"""A whole worker in front of a modeled server, in virtual time: isolation, hang-ups, faults, conservation."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.step_time.cost import StepCost
from engine.streaming import UpstreamBusy, UpstreamLoad, UpstreamUnusable
from scheduler.clock import SystemClock
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.drivers.streams.core import StreamCore
from scheduler.drivers.streams.driver import StreamDriver
from scheduler.drivers.streams.precedence import QUIET_S
from scheduler.drivers.streams.recompute import RECOMPUTE_SHARE
from scheduler.queue.memory_state import Output
from scheduler.request import Delivery, EventKind
from scheduler.worker.checkpoints import CHECKPOINT_S
from tests.scheduler.builders import make_tiers
from tests.scheduler.drivers.streams.modeled_upstream import ModeledUpstream, token_at
from tests.scheduler.world import Answer, World, play_in_world, played_by

T = TypeVar("T")
GPU = StepCost(step_s=0.010, prefill_token_s=2e-5, attend_s=0.0, context_token_s=0.0, decode_s=2e-5)
# About vLLM on two cores with a model of 135 M parameters.
CPU = StepCost(step_s=0.019, prefill_token_s=0.0008, attend_s=0.0, context_token_s=0.0, decode_s=0.00033)


def play(
    story: Callable[[World], Awaitable[T]],
    *,
    tiers: TierSet | None = None,
    max_in_flight: int | None = None,
    stall_s: float | None = None,
    **server: Any,
) -> T:
    """Play `story` before a modeled server, then drain the worker, and check that nothing is left over."""
    limits = {"max_in_flight": max_in_flight, "stall_s": stall_s}

    def begin(world: World) -> None:
        upstream = ModeledUpstream(world.clock, **server)
        given = {name: value for name, value in limits.items() if value is not None}
        core = StreamCore(world.tiers, upstream, SLAController(world.tiers), **given)
        world.begin_worker(StreamDriver(core, upstream), upstream)

    async def whole(world: World) -> tuple[World, T]:
        serving = asyncio.create_task(world.engine.run())
        result = await story(world)
        world.loop.drain()
        await asyncio.wait([world.running])
        serving.cancel()
        return world, result

    world, result = play_in_world(whole, tiers or make_tiers(), begin)
    assert len(world.core.held) == world.core.num_in_flight == 0
    assert not world.engine.running and not world.engine.waiting
    counts = world.core.held.counts
    assert counts["accepted"] == sum(counts[k] for k in ("finished", "failed", "cancelled", "released"))
    return result


def is_right(answer: Answer) -> bool:
    request = answer.request
    expected = [token_at(request.prompt_token_ids, i) for i in range(request.sampling.max_tokens)]
    return answer.token_ids == expected and answer.events[-1].kind is EventKind.FINISHED


def at(answers: list[Answer], share: float) -> float:
    times = sorted(answer.ttft_s for answer in answers)
    return times[min(len(times) - 1, int(share * len(times)))]


async def closed_loop(world: World, name: str, seconds: float, **request: Any) -> list[Answer]:
    """Ask again and again; return the answers that came."""
    answers, until_s = list[Answer](), world.clock.now() + seconds
    while world.clock.now() < until_s:
        answers.append(await world.ask(f"{name}-{len(answers)}", **request))
    return answers


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Return a prompt that begins like no other one."""
    return number + 3, *range(3, 2 + length)


async def chats(world: World, count: int, every_s: float = 0.5) -> list[Answer]:
    """Ask `count` chats at a fixed rate, whether the earlier ones have ended or not."""
    asked = []
    for number in range(count):
        request = world.ask(f"chat-{number}", prompt=prompt(number, 32 + 13 * number % 96), max_tokens=32)
        asked.append(asyncio.create_task(request))
        await world.clock.sleep(every_s * (0.7 + 0.6 * (number * 37 % 100) / 100))
    return await asyncio.gather(*asked)


async def bulk(world: World, streams: int, seconds: float) -> list[Answer]:
    loops = [
        closed_loop(
            world,
            f"bulk-{i}",
            seconds,
            tier="bulk",
            prompt=prompt(i, 64 + 31 * i % 192),
            max_tokens=128,
            temperature=0.0,
        )
        for i in range(streams)
    ]
    return [answer for answers in await asyncio.gather(*loops) for answer in answers]


def test_chat_beside_bulk_is_nearly_as_fast_as_alone() -> None:
    async def alone(world: World) -> tuple[list[Answer], list[Answer]]:
        return await chats(world, 40), []

    async def beside(world: World) -> tuple[list[Answer], list[Answer]]:
        flood = asyncio.create_task(bulk(world, 64, 27.0))
        await world.clock.sleep(5.0)
        asked = await chats(world, 40)
        num_at_most = 0.055 * world.core.recompute.num_computed
        assert world.core.recompute.tokens.total() <= num_at_most, "at most 5 % is computed again"
        return asked, await flood

    async def only_bulk(world: World) -> tuple[list[Answer], list[Answer]]:
        return [], await bulk(world, 64, 27.0)

    tiers = make_tiers(realtime={"max_slowdown": 2.0})
    single, _ = play(alone, tiers=tiers, cost=CPU, noise=0.1)
    mixed, answers = play(beside, tiers=tiers, cost=CPU, noise=0.1)
    _, undisturbed = play(only_bulk, tiers=tiers, cost=CPU, noise=0.1)
    assert all(is_right(answer) for answer in (*single, *mixed, *answers))
    assert at(mixed, 0.5) <= 1.5 * at(single, 0.5)
    assert at(mixed, 0.99) <= 2.5 * at(single, 0.99)
    assert len(answers) >= 0.7 * len(undisturbed)


def test_chats_after_a_silence_do_not_wait_for_the_end_of_bulks_streams() -> None:
    """A server on which each stream makes a step longer, and a minute in which it had bulk alone."""

    async def beside(world: World) -> list[Answer]:
        flood = asyncio.create_task(bulk(world, 64, 62.0))
        await world.clock.sleep(60.0)
        asked = await chats(world, 3, 1.4)
        await flood
        return asked

    async def alone(world: World) -> list[Answer]:
        return await chats(world, 3, 1.4)

    cost = StepCost(step_s=0.018, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.0016)
    server = {"cost": cost, "noise": 0.1, "places": 128, "caches_prefixes": True}
    tiers = make_tiers(realtime={"max_slowdown": 1.25})
    single, mixed = play(alone, tiers=tiers, **server), play(beside, tiers=tiers, **server)

    def times_s(answers: list[Answer]) -> list[float]:
        """Return how long the answers came after their first tokens."""
        return [answer.ended_s - answer.first_token_s for answer in answers if answer.first_token_s is not None]

    slowdowns = [slow_s / fast_s for slow_s, fast_s in zip(times_s(mixed), times_s(single), strict=True)]
    assert slowdowns[0] <= 2 and max(slowdowns[1:]) <= 1.3


def test_first_tokens_before_a_fast_server_are_those_of_its_steps() -> None:
    """A GPU's costs, and bulk in parts: what of a part is cached is no prompt that a chat would wait for."""

    async def alone(world: World) -> list[Answer]:
        return await chats(world, 60, 0.25)

    async def beside(world: World) -> list[Answer]:
        flood = asyncio.create_task(bulk(world, 64, 20.0))
        await world.clock.sleep(4.0)
        asked = await chats(world, 60, 0.25)
        await flood
        return asked

    tiers = make_tiers(realtime={"max_slowdown": 1.25, "slo": {"ttft_p99_ms": 200, "itl_p99_ms": 50}})
    server = {"cost": GPU, "noise": 0.1, "places": 256, "caches_prefixes": True}
    mixed, single = play(beside, tiers=tiers, **server), play(alone, tiers=tiers, **server)
    assert at(mixed, 0.5) <= 1.3 * at(single, 0.5)
    assert at(mixed, 0.99) <= 1.5 * at(single, 0.99)


def test_between_sparse_chats_bulk_has_most_of_what_it_has_alone() -> None:
    """A server that is fast beside its fixed cost: a chat is there for a tenth of the time."""
    lead_s, chats_s = 10.0, 15.0
    cost = StepCost(step_s=0.01, prefill_token_s=1.25e-4, attend_s=0.0, context_token_s=0.0, decode_s=2.5e-4)
    server = {"cost": cost, "noise": 0.1, "places": 128, "caches_prefixes": True}

    async def alone(world: World) -> list[Answer]:
        return await chats(world, 5, chats_s / 5)

    async def bulk_tokens(world: World, beside: Callable[[World], Awaitable[T]]) -> tuple[int, T]:
        requests = [{"tier": "bulk", "prompt": prompt(i, 40), "max_tokens": 64 + 2 * i} for i in range(64)]
        loops = [closed_loop(world, f"bulk-{i}", lead_s + chats_s, **one) for i, one in enumerate(requests)]
        flood = asyncio.gather(*loops)
        await world.clock.sleep(lead_s)
        num_before = world.core.recompute.num_computed
        result = await beside(world)
        num_tokens = world.core.recompute.num_computed - num_before
        await flood
        assert world.core.recompute.tokens.total() <= RECOMPUTE_SHARE * world.core.recompute.num_computed
        return num_tokens, result

    single = play(alone, **server)
    num_beside, mixed = play(lambda world: bulk_tokens(world, alone), **server)
    num_alone, _ = play(lambda world: bulk_tokens(world, lambda world: world.clock.sleep(chats_s)), **server)
    assert num_beside >= 0.55 * num_alone
    assert at(mixed, 0.5) <= 1.8 * at(single, 0.5), "half of a step is waited for in any case"
    mixed_s, single_s = (sum((a.ended_s or 0.0) - a.submitted_s for a in asked) for asked in (mixed, single))
    assert mixed_s <= 1.25 * single_s


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_answers_take_at_most_max_slowdown_times_as_long(caches_prefixes: bool) -> None:
    async def alone(world: World) -> list[Answer]:
        return await chats(world, 20)

    async def beside(world: World) -> list[Answer]:
        flood = asyncio.create_task(bulk(world, 32, 14.0))
        await world.clock.sleep(4.0)
        asked = await chats(world, 20)
        answers = await flood
        assert all(is_right(answer) for answer in answers)
        return asked

    def mean_s(answers: list[Answer]) -> float:
        return sum((answer.ended_s or 0.0) - answer.submitted_s for answer in answers) / len(answers)

    tiers = make_tiers(realtime={"max_slowdown": 1.25})
    times_s = [mean_s(play(story, tiers=tiers, cost=CPU, caches_prefixes=caches_prefixes)) for story in (beside, alone)]
    assert 1.0 <= times_s[0] / times_s[1] <= 1.3


def test_bulk_comes_in_parts_where_the_server_keeps_them() -> None:
    async def story(world: World) -> int:
        bulk_task = asyncio.create_task(world.ask("bulk", tier="bulk", prompt=40, max_tokens=150, temperature=0.0))
        sampled = await world.ask("penal", tier="bulk", prompt=40, max_tokens=150, presence_penalty=0.5)
        seen = await world.ask("image", tier="bulk", prompt=40, max_tokens=150, temperature=0.0, chat="{}")
        answer, chat = await bulk_task, await world.ask("chat", max_tokens=150)
        assert all(is_right(one) for one in (answer, sampled, seen, chat))
        assert world.core.recompute.tokens.total() == 0 and not world.core.status(0.0).preemptions
        parts = [(s.seq_id, s.sampling.max_tokens, len(s.output_token_ids)) for s in world.engine.opened]
        assert [part for part in parts if part[0] == "bulk"] == [("bulk", 64, 0), ("bulk", 128, 64), ("bulk", 150, 128)]
        assert [part[1:] for part in parts if part[0] in ("penal", "image", "chat")] == [(150, 0)] * 3
        return world.core.recompute.num_computed

    num_computed = play(story, caches_prefixes=True)
    assert num_computed <= 4 * (40 + 150) + 2 * 16, "of each part, less than a block is computed again"


def test_a_part_that_ends_inside_of_a_character_is_not_the_end_of_the_answer() -> None:
    """llama.cpp sends a character's tokens with its last one only."""

    async def story(world: World) -> None:
        world.engine.cuts_characters = True
        answer = await world.ask("bulk", tier="bulk", prompt=40, max_tokens=150, temperature=0.0)
        assert answer.token_ids == [token_at(answer.request.prompt_token_ids, i) for i in range(149)]
        assert [len(s.output_token_ids) for s in world.engine.opened] == [0, 63, 126]

    play(story, caches_prefixes=True)


def test_a_part_of_a_prompt_after_which_a_character_begins_is_cached() -> None:
    """llama.cpp sends no token then."""

    async def story(world: World) -> None:
        asked = asyncio.create_task(chats(world, 10))
        await world.clock.sleep(1.0)
        world.engine.cuts_characters = True
        async with asyncio.timeout(60.0):
            answer = await world.ask("long", "bulk", prompt(500, 400), 20)
        sent = [len(s.prompt_token_ids) for s in world.engine.opened if s.seq_id == "long"]
        assert len(answer.token_ids) == 19 and len(sent) >= 4 and sent[-1] == max(sent)
        await asked

    play(story, cost=CPU, caches_prefixes=True)


@pytest.mark.parametrize("change", [{}, {"repeats_cached": True}, {"forgets": True}])
def test_answers_come_whole_while_a_server_keeps_less_than_it_showed_and_bulk_is_still_hung_up(
    change: dict[str, bool],
) -> None:
    async def story(world: World) -> int:
        for name, value in {"keeps_answers": False, **change}.items():
            setattr(world.engine, name, value)
        asked = [world.ask(f"b{i}", "bulk", prompt(i, 64), 128, temperature=0.0) for i in range(400)]
        flood = asyncio.gather(*asked)
        await world.clock.sleep(50.0)
        assert 0.04 <= world.core.recompute.tokens.total() / world.core.recompute.num_computed <= 0.07
        assert all(is_right(answer) for answer in (*await chats(world, 3), *await flood))
        return world.core.status(0.0).preemptions.total()

    assert play(story, cost=CPU, caches_prefixes=True, places=16, tells_places=True) > 0


@pytest.mark.parametrize("forgets", [False, True])
def test_what_a_server_has_to_compute_again_after_its_restart_is_no_cost_of_hang_ups(forgets: bool) -> None:
    async def story(world: World) -> None:
        asked = [world.ask(f"b{i}", "bulk", prompt(i, 300), 200, temperature=0.0) for i in range(16)]
        flood = asyncio.gather(*asked)
        await world.clock.sleep(6.0)
        world.engine.die()
        if forgets:
            world.engine._cached.clear()
        await world.clock.sleep(3.0)
        world.engine.is_up = True
        assert all(is_right(answer) for answer in await flood)
        assert world.core.recompute.tokens.total() == 0
        assert world.core.recompute.hang_ups.level > 0

    play(story, cost=CPU, caches_prefixes=True, places=16, tells_places=True)


@pytest.mark.parametrize("repeats_cached", [False, True])
def test_prefixes_of_other_requests_are_no_room_for_hang_ups(repeats_cached: bool) -> None:
    async def story(world: World) -> None:
        world.engine.repeats_cached = repeats_cached
        for number in range(4):
            assert is_right(await world.ask(f"b{number}", "bulk", 200, 100, temperature=0.0))
        share = RECOMPUTE_SHARE * world.core.recompute.num_computed + 1
        num_at_most = RECOMPUTE_SHARE * world.clock.now() / world.core.status(0.0).step_cost.prefill_token_s
        assert world.core.recompute.hang_ups.level <= num_at_most and world.core.recompute.parts.level <= share

    play(story, caches_prefixes=True)


def test_many_streams_are_hung_up_at_once_where_the_server_keeps_what_they_have() -> None:
    async def story(world: World) -> int:
        asked = [world.ask(f"b{i}", "bulk", prompt(i, 200), 128, temperature=0.0) for i in range(100)]
        flood = asyncio.gather(*asked)
        await world.clock.sleep(20.0)
        assert is_right(await world.ask("chat", max_tokens=8))
        num_hung_up = world.core.status(0.0).preemptions.total()
        assert all(is_right(answer) for answer in await flood)
        return num_hung_up

    cost = StepCost(step_s=0.010, prefill_token_s=0.003, attend_s=0.0, context_token_s=0.0, decode_s=0.012)
    assert play(story, cost=cost, caches_prefixes=True, places=16, tells_places=True) >= 8


@pytest.mark.parametrize(("places", "caches_prefixes"), [(1, False), (2, True), (8, False)])
def test_bulk_has_its_min_share_where_chats_take_all_places(places: int, caches_prefixes: bool) -> None:
    async def story(world: World) -> float:
        flood = asyncio.create_task(bulk(world, 4, 60.0))
        loops = [
            closed_loop(world, f"chat-{i}", 60.0, prompt=prompt(100 + i, 40), max_tokens=30) for i in range(3 * places)
        ]
        asked = [answer for answers in await asyncio.gather(*loops) for answer in answers]
        num_bulk = sum(len(s.token_ids) for s in world.answers.values() if s.request.tier == "bulk")
        assert all(is_right(answer) for answer in await flood)
        return num_bulk / sum(len(answer.token_ids) for answer in asked)

    tiers, server = make_tiers(bulk={"floor": 0.1}), {"tells_places": True, "cost": CPU, "noise": 0.1}
    assert 0.03 <= play(story, tiers=tiers, places=places, caches_prefixes=caches_prefixes, **server) <= 0.3


def test_what_cannot_be_hung_up_leaves_places_for_the_first_chat() -> None:
    """Such as answers with a JSON schema: a chat would wait for the end of one of them."""

    async def story(world: World) -> None:
        asked = [world.ask(f"b{i}", "bulk", prompt(i, 64), 300, presence_penalty=0.5) for i in range(20)]
        flood = asyncio.gather(*asked)
        await world.clock.sleep(10.0)
        assert len(world.engine.running) == 6
        assert (await world.ask("chat", max_tokens=8)).ttft_s <= 0.2
        await flood

    play(story, cost=CPU, caches_prefixes=True, places=8, tells_places=True)


def test_nothing_is_sent_before_the_servers_first_answer() -> None:
    tiers = make_tiers()
    core = StreamCore(tiers, ModeledUpstream(SystemClock()), SLAController(tiers))
    assert core.claim_limits(0.0) == {}
    core.note_load(UpstreamLoad(), 0.0)
    assert core.claim_limits(0.0) != {}


@pytest.mark.parametrize("keeps", [True, False])
def test_bulk_prompts_come_in_parts_beside_chats_and_the_answers_are_the_same(keeps: bool) -> None:
    async def story(world: World) -> None:
        asked = asyncio.create_task(chats(world, 10))
        await world.clock.sleep(1.0)
        world.engine.forgets = not keeps
        long = {"tier": "bulk", "prompt": prompt(500, 400), "max_tokens": 20}
        whole, penal = await asyncio.gather(
            world.ask("long", **long), world.ask("penal", **long | {"prompt": prompt(600, 400)}, presence_penalty=0.5)
        )
        assert all(is_right(answer) for answer in (whole, penal, *await asked))
        assert whole.events[-1].cached_tokens == 0, "its own parts are no prefix that another request has left"
        for name in ("long", "penal"):
            sent = [(len(s.prompt_token_ids), s.sampling.max_tokens) for s in world.engine.opened if s.seq_id == name]
            assert sent[-1] == (400, 20)
            assert all(n % 16 == 0 and max_tokens == 1 for n, max_tokens in sent[:-1])
            assert sent[-2] == max(sent[:-1]) if keeps else sent == sorted(sent), "chats may recall a part"
            assert len(sent) >= 4 if keeps else len(sent) == 3, "what is not kept is sent whole after the second part"
        assert keeps == (world.core.recompute.tokens.total() == 0)
        world.engine.opened.clear()
        await world.clock.sleep(QUIET_S * 4)
        assert is_right(await world.ask("later", "bulk", prompt(700, 400)))
        assert len(world.engine.opened) == 1, "nobody is delayed, so it is sent whole"

    play(story, cost=CPU, caches_prefixes=True)


async def bulk_that_begins_alike(world: World, seconds: float) -> list[Answer]:
    """Ask for short answers to prompts of 300 tokens, of which the first 240 are those of all."""
    common = tuple(range(3, 243))
    loops = [
        closed_loop(world, f"bulk-{i}", seconds, tier="bulk", prompt=(*common, *prompt(i, 60)), max_tokens=30)
        for i in range(16)
    ]
    return [answer for answers in await asyncio.gather(*loops) for answer in answers]


@pytest.mark.parametrize("forgets", [False, True])
def test_a_beginning_that_other_prompts_have_left_is_no_work(forgets: bool) -> None:
    """The server says at the end of an answer what it has found; if it is less, nothing is expected any more."""

    async def story(world: World) -> tuple[float, int]:
        await chats(world, 4)
        flood = asyncio.create_task(bulk_that_begins_alike(world, 40.0))
        await world.clock.sleep(10.0)
        if forgets:
            world.engine.forgets = True
            world.engine._cached.clear()
        asked = await chats(world, 30, 1.0)
        learned = world.core.status(world.clock.now()).step_cost.prefill_token_s
        answers = await flood
        assert all(is_right(answer) for answer in (*asked, *answers))
        return learned, len(answers)

    learned, num_answers = play(story, cost=CPU, noise=0.1, caches_prefixes=True)
    assert 0.7 <= learned / CPU.prefill_token_s <= 1.5
    assert forgets or num_answers >= 100


def test_a_chat_waits_for_no_long_prompt_of_bulk() -> None:
    async def alone(world: World) -> list[Answer]:
        return await chats(world, 40)

    async def beside(world: World) -> list[Answer]:
        loops = [
            closed_loop(world, f"bulk-{i}", 24.0, tier="bulk", prompt=prompt(i + 200, 300 + i * 5), max_tokens=64)
            for i in range(32)
        ]
        flood = asyncio.gather(*loops)
        asked = await chats(world, 40)
        await flood
        return asked[4:]  # nobody expected the first ones

    tiers = make_tiers(realtime={"max_slowdown": 1.25})
    mixed, single = (play(story, tiers=tiers, cost=CPU, noise=0.1, caches_prefixes=True) for story in (beside, alone))
    assert at(mixed, 0.5) <= 1.3 * at(single, 0.5)
    assert at(mixed, 0.99) <= 1.8 * at(single, 0.99)


@pytest.mark.parametrize("places", [2, 3])
def test_a_chat_has_a_place_at_once_where_a_server_has_few_and_keeps_nothing(places: int) -> None:
    """As llama.cpp with API keys. A prompt is soon computed again, and an answer of bulk takes many seconds."""

    async def beside(world: World) -> list[Answer]:
        loops = [
            closed_loop(world, f"b{i}", 60.0, tier="bulk", prompt=prompt(i, 160), max_tokens=200) for i in range(6)
        ]
        flood = asyncio.gather(*loops)
        await world.clock.sleep(20.0)
        asked = await chats(world, 6, 6.0)
        assert all(is_right(answer) for answers in await flood for answer in answers)
        return asked

    async def alone(world: World) -> list[Answer]:
        return await chats(world, 6, 6.0)

    cost = StepCost(step_s=0.018, prefill_token_s=0.001, attend_s=0.0, context_token_s=0.0, decode_s=0.0016)
    server = {"cost": cost, "noise": 0.1, "places": places, "tells_places": True}
    assert at(play(beside, **server), 0.99) <= 3 * at(play(alone, **server), 0.99)


def test_the_servers_own_queue_stays_empty_once_its_places_are_known() -> None:
    async def story(world: World) -> int:
        flood = asyncio.create_task(bulk(world, 20, 9.0))
        await world.clock.sleep(5.0)
        most = 0
        for _ in range(40):
            await world.clock.sleep(0.1)
            most = max(most, len(world.engine.waiting))
        await flood
        return most

    assert play(story, places=8) <= 2


@pytest.mark.parametrize("chats_first", [False, True])
@pytest.mark.parametrize("decode_s", [0.0, 0.002, 0.012])
def test_what_more_streams_cost_is_learned_where_bulk_takes_all_places(decode_s: float, chats_first: bool) -> None:
    """A server with few places, as llama.cpp, on which bulk keeps to one number of streams."""
    cost = StepCost(step_s=0.010, prefill_token_s=0.003, attend_s=0.0, context_token_s=0.0, decode_s=decode_s)

    async def story(world: World) -> StepCost:
        if chats_first:
            await chats(world, 10, 2.0)
        flood = asyncio.create_task(bulk(world, 64, 60.0))
        await world.clock.sleep(55.0)
        learned = world.core.status(world.clock.now()).step_cost
        await flood
        return learned

    learned = play(story, places=16, tells_places=True, caches_prefixes=True, cost=cost, noise=0.1)
    few, many = ((learned.step(n * learned.decode(200))) / cost.step(n * cost.decode(200)) for n in (2, 16))
    assert 0.8 <= few <= 1.5 and 0.8 <= many <= 1.5, "with the safety factor of noisy steps"


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_bulk_alone_finds_out_that_a_server_has_more_places_again(caches_prefixes: bool) -> None:
    """A server without known places that has refused requests for a while."""

    async def story(world: World) -> None:
        world.engine.refuses = True
        flood = asyncio.create_task(bulk(world, 60, 70.0))
        await world.clock.sleep(15.0)
        world.engine.places = 12
        await world.clock.sleep(15.0)
        assert world.core.limit.value <= 16
        world.engine.places = 50
        most = 0
        for _ in range(80):
            await world.clock.sleep(0.5)
            most = max(most, len(world.engine.running))
        assert most >= 40
        await flood

    play(story, places=50, caches_prefixes=caches_prefixes)


def test_the_servers_own_queue_is_never_used_if_it_tells_its_places() -> None:
    async def story(world: World) -> None:
        flood = [world.ask(f"bulk-{i}", "bulk", prompt(i, 64), 32) for i in range(40)]
        answers = asyncio.gather(*flood)
        for _ in range(200):
            await world.clock.sleep(0.01)
            assert world.core.num_in_flight <= 8
        assert all(is_right(answer) for answer in await answers)

    play(story, places=8, tells_places=True)


def test_bulk_is_hung_up_for_a_first_token_at_risk_and_continued() -> None:
    """All places of the server are taken by bulk when a chat arrives: it would wait there for seconds."""

    async def story(world: World) -> tuple[list[Answer], list[Answer]]:
        flood = asyncio.create_task(bulk(world, 8, 12.0))
        await world.clock.sleep(8.0)
        assert len(world.engine.running) == 6, "two places are left, because all of a stream would be computed again"
        asked = await chats(world, 8, every_s=0.3)
        return asked, await flood

    async def run(world: World) -> tuple[list[Answer], list[Answer], int]:
        asked, answers = await story(world)
        continued = [r for r in world.engine.opened if r.output_token_ids]
        assert all(r.sampling.max_tokens > len(r.output_token_ids) for r in continued)
        return asked, answers, len(continued)

    asked, answers, num_continued = play(run, places=8, max_in_flight=8)
    assert all(is_right(answer) for answer in (*asked, *answers))
    assert num_continued >= 1
    assert at(asked, 0.99) < 1.0


@pytest.mark.parametrize(
    "sampling", [{"presence_penalty": 0.5}, {"temperature": 1.0, "is_seeded": True}, {"temperature": 0.0, "chat": "{}"}]
)
def test_what_cannot_be_continued_faithfully_is_finished_instead(sampling: dict[str, Any]) -> None:
    async def story(world: World) -> int:
        async def ask(number: int) -> Answer:
            request = world.request(f"b{number}", "bulk", 32, 100, **kinds)
            return await world.receive(msgspec.structs.replace(request, is_seeded=is_seeded))

        flood = [asyncio.create_task(ask(i)) for i in range(8)]
        await world.clock.sleep(1.0)
        await world.ask("chat")
        assert all(is_right(answer) for answer in await asyncio.gather(*flood))
        return sum(bool(r.output_token_ids) for r in world.engine.opened)

    kinds = dict(sampling)
    is_seeded = bool(kinds.pop("is_seeded", False))
    assert play(story, places=8, max_in_flight=8) == 0


def test_a_server_that_dies_in_mid_stream_loses_nothing() -> None:
    async def story(world: World) -> list[Answer]:
        asked = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=200, temperature=0.0)) for i in range(10)]
        await world.clock.sleep(1.0)
        assert world.engine.running
        world.engine.die()
        await world.clock.sleep(1.5)
        world.engine.is_up = True
        return await asyncio.gather(*asked)

    assert all(is_right(answer) for answer in play(story))


@pytest.mark.parametrize("how", ["dies", "freezes", "is away"])
def test_an_answer_that_cannot_go_on_where_it_ended_ends_with_an_error(how: str) -> None:
    """The client has its beginning, and a new one would be another. What nobody has seen yet begins again."""

    async def story(world: World) -> tuple[Answer, Answer]:
        world.engine.repeats = False
        penalised = {"max_tokens": 200, "presence_penalty": 0.5}
        seen = asyncio.create_task(world.ask("seen", "bulk", **penalised))
        unseen = asyncio.create_task(world.ask("unseen", "bulk", delivery=Delivery.AT_END, **penalised))
        await world.clock.sleep(1.0)
        assert len(world.engine.running) == len(world.engine.opened) == 2
        if how == "dies":
            world.engine.die()
        else:
            world.engine.is_frozen, world.engine.is_up = True, how == "freezes"
        await world.clock.sleep(8.0)
        assert how != "freezes" or len(world.engine.opened) == 3, "after 5 s without a token, there is another stream"
        world.engine.is_up = True
        world.engine.thaw()
        return await seen, await unseen

    seen, unseen = play(story, stall_s=5.0)
    assert seen.events[-1].kind is EventKind.UNAVAILABLE
    assert "cannot be continued" in seen.events[-1].error
    assert 0 < len(seen.token_ids) < 200
    assert is_right(unseen)


@played_by(play)
async def test_a_server_that_is_away_for_long_makes_the_worker_look_dead(world: World) -> None:
    """Bulk waits in the store; what only this worker can continue stays here; chats are refused."""
    begun = asyncio.create_task(world.ask("begun", "bulk", max_tokens=300, temperature=0.0))
    await world.clock.sleep(1.0)
    world.engine.die()
    await world.clock.sleep(0.1)
    chat = asyncio.create_task(world.ask("chat"))
    later = asyncio.create_task(world.ask("later", "bulk"))
    await world.clock.sleep(20.0)
    assert await world.registry.workers() == []
    assert (await chat).events[-1].kind is EventKind.UNAVAILABLE
    assert (await world.queue.depths(["bulk"]))["bulk"] == 1
    assert [state.id for state in world.core.held.states] == ["begun"]
    world.engine.is_up = True
    assert is_right(await begun) and is_right(await later)
    assert [r.seq_id for r in world.engine.opened].count("begun") == 2


@pytest.mark.parametrize("tells_load", [False, True])
def test_what_waits_in_the_servers_own_queue_burns_no_attempts(
    tells_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that tells nothing of itself, and has fewer places than it is sent: the others' answers take minutes."""

    async def tells_nothing(self: ModeledUpstream) -> None: ...

    async def story(world: World) -> None:
        asked = [world.ask(f"b{i}", "batch", prompt(i, 64), 450, temperature=0.0) for i in range(6)]
        chat = world.ask("chat", max_tokens=300)
        assert all(is_right(answer) for answer in await asyncio.gather(*asked, chat))
        assert len(world.engine.opened) == 7

    if not tells_load:
        monkeypatch.setattr(ModeledUpstream, "load", tells_nothing)
    play(story, places=2, cost=StepCost(step_s=0.3, decode_s=0.0))


def test_a_stream_that_the_server_has_forgotten_is_lost_although_others_go_on() -> None:
    async def story(world: World) -> None:
        flood = asyncio.create_task(bulk(world, 2, 60.0))
        await world.clock.sleep(10.0)
        world.engine.loses = "lost"
        lost = asyncio.create_task(world.ask("lost", "bulk"))
        await world.clock.sleep(25.0)
        world.engine.loses = ""
        assert is_right(await lost)
        assert [s.seq_id for s in world.engine.opened].count("lost") == 2
        await flood

    play(story, cost=CPU)


def test_a_prefill_that_takes_longer_than_the_stall_limit_is_not_lost() -> None:
    """Its time follows from that of shorter prompts. A server of which nothing is known has more time each time, and
    this one computes what was hung up to its end."""

    async def story(world: World) -> None:
        assert is_right(await world.ask("short", "bulk", 40))
        assert is_right(await world.ask("long", "bulk", prompt(1, 400)))
        assert [s.seq_id for s in world.engine.opened] == ["short", "long"]

    async def unknown(world: World) -> None:
        assert is_right(await world.ask("long", "bulk", prompt(1, 400)))
        assert len(world.engine.opened) == 4, "the last attempt"

    cost = StepCost(step_s=0.02, prefill_token_s=0.06, attend_s=0.0, context_token_s=0.0, decode_s=0.0005)
    play(story, cost=cost, stall_s=10.0)
    play(unknown, cost=cost, stall_s=10.0)


def test_a_server_that_turns_everyone_away_burns_no_attempts() -> None:
    """A key that the server takes no longer: all work waits in the store until the server serves us again."""

    async def story(world: World) -> None:
        world.engine.refusals[""] = UpstreamUnusable("The server answered 401: no such key")
        asked = [asyncio.create_task(world.ask(f"b{i}", "bulk")) for i in range(10)]
        await world.clock.sleep(60.0)
        assert (await world.queue.depths(["bulk"]))["bulk"] == 10
        assert await world.registry.workers() == []
        assert len(world.engine.refused) <= 10, "nothing is sent while a trial fails"
        del world.engine.refusals[""]
        assert all(is_right(answer) for answer in await asyncio.gather(*asked))

    with capture_logs() as logs:
        play(story)
    [said] = [line for line in logs if line["log_level"] == "error"]
    assert "401: no such key" in said["reason"]


def test_a_request_that_alone_is_turned_away_is_given_up_and_others_go_on() -> None:
    """Such as one whose text a firewall before the server does not let pass."""

    async def story(world: World) -> tuple[Answer, list[Answer]]:
        world.engine.refusals["bad"] = UpstreamUnusable("The server answered 403: blocked")
        flood = asyncio.create_task(bulk(world, 4, 10.0))
        bad = await world.ask("bad", "bulk")
        return bad, await flood

    bad, others = play(story)
    assert bad.events[-1].kind is EventKind.UNAVAILABLE
    assert "403: blocked The request was given up after 4 attempts." in bad.events[-1].error
    assert all(is_right(answer) for answer in others)


def test_a_request_that_is_always_refused_as_busy_stops_no_others_and_is_given_up() -> None:
    async def story(world: World) -> tuple[list[Answer], list[Answer]]:
        flood = asyncio.create_task(bulk(world, 2, 60.0))
        await world.clock.sleep(1.0)
        bad = [await world.ask(name, "bulk", job_part="a line") for name in ("bad", "again")]
        return bad, await flood

    async def undisturbed(world: World) -> tuple[list[Answer], list[Answer]]:
        return [], await bulk(world, 2, 60.0)

    async def refusing(world: World) -> tuple[list[Answer], list[Answer]]:
        world.engine.refusals |= dict.fromkeys(("bad", "again"), UpstreamBusy("The server answered 429: no.", 5.0))
        bad, others = await story(world)
        assert world.engine.refused.count("bad") <= 8
        assert world.engine.refused.count("again") == 1, "what was given up is remembered by its name"
        return bad, others

    bad, others = play(refusing, cost=CPU)
    _, usual = play(undisturbed, cost=CPU)
    for answer in bad:
        assert answer.events[-1].kind is EventKind.UNAVAILABLE
        assert "429: no. The request was given up" in answer.events[-1].error
    assert all(is_right(answer) for answer in others)
    assert len(others) >= 0.7 * len(usual), "the first refusals pause all"


def test_a_bug_in_the_probe_ends_the_worker_and_not_the_probe_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: ModeledUpstream) -> None:
        raise ValueError("a bug")

    async def story(world: World) -> None:
        await world.running

    monkeypatch.setattr(ModeledUpstream, "load", fail)
    with pytest.raises(ValueError, match="a bug"):
        play(story)


@played_by(play)
async def test_a_stopped_worker_gives_its_requests_back(world: World) -> None:
    asked = [asyncio.create_task(world.ask(f"b{i}", "bulk", max_tokens=400)) for i in range(3)]
    await world.clock.sleep(1.0)
    world.loop.stop()
    await world.running
    assert (await world.queue.depths(["bulk"]))["bulk"] == 3
    assert not world.engine.running
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@played_by(play)
async def test_bulk_is_checkpointed_and_a_claim_continues_from_its_checkpoint(world: World) -> None:
    outputs = world.queue._shared.outputs
    asked = asyncio.create_task(world.ask("first", "bulk", max_tokens=300, delivery=Delivery.AT_END))
    await world.clock.sleep(CHECKPOINT_S + 0.1)
    saved = outputs["first"].token_ids
    assert 32 <= len(saved) < 300
    assert is_right(await asked)
    world.engine.is_up = False
    await world.clock.sleep(4.0)  # so that the worker notices it, and claims nothing
    again = asyncio.create_task(world.ask("second", "bulk", max_tokens=300, delivery=Delivery.AT_END))
    penalised = asyncio.create_task(
        world.ask("penalised", "bulk", max_tokens=300, delivery=Delivery.AT_END, frequency_penalty=0.5)
    )
    await world.clock.sleep(0.1)
    for name in ("second", "penalised"):
        outputs[name] = Output(token_ids=saved)
    world.engine.is_up = True
    assert is_right(await again) and is_right(await penalised)
    continued = {stream.seq_id: stream.output_token_ids for stream in world.engine.opened}
    # Penalties would not know the earlier tokens.
    assert continued == {"first": (), "second": saved, "penalised": ()}


@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_a_deadline_of_its_own_is_met_where_others_of_the_tier_have_all_places(caches_prefixes: bool) -> None:
    """They go on for minutes. One of them is hung up for it."""

    async def story(world: World) -> float:
        flood = [asyncio.create_task(world.ask(f"b{i}", "bulk", 64, 2000)) for i in range(100)]
        await world.clock.sleep(20.0)
        begun_s, due_ms = world.clock.now(), world.clock.wall_ms() + 15_000
        await world.ask("job", "bulk", 64, 60, deadline_ms=due_ms)
        took_s = world.clock.now() - begun_s
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        return took_s

    assert play(story, max_in_flight=8, cost=CPU, caches_prefixes=caches_prefixes) < 7.0
