"""Keys and interactive tiers in front of a server that plans its own steps: nobody is pushed aside."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.step_time.cost import StepCost
from scheduler.config import TierSet
from scheduler.drivers.streams.precedence import QUIET_S
from tests.marks import mostly_full
from tests.scheduler.builders import make_tiers
from tests.scheduler.drivers.streams.test_world import CPU, GPU, at, is_right, play
from tests.scheduler.world import Answer, World

LEAD_S = 4.0  # for which a flood runs before the others come
ROOMY = {"queue_limit": 1000}
TIERS = make_tiers(realtime=ROOMY)
# Costs, whether the server caches prefixes, tokens of a flood's answers, most times that a chat's first token takes.
FLOODS = [(CPU, True, 64, 2.0), (CPU, False, 64, 2.0), (CPU, True, 400, 2.0), (GPU, True, 64, 2.5)]


def prompt(number: int) -> tuple[int, ...]:
    """Return a prompt of 32 to 127 tokens, which begins like no other one."""
    return tuple((number * 7 + position * 13) % 900 for position in range(32 + 31 * number % 96))


async def flood(
    world: World, owner: str, streams: int, until_s: float, tokens: int = 64, **request: Any
) -> list[Answer]:
    """Run closed loops of one key."""
    answers = list[Answer]()

    async def loop(number: int) -> None:
        while world.clock.now() < until_s:
            name, begin = f"{owner}{len(world.answers)}", prompt(streams * len(answers) + number)
            answers.append(
                await world.ask(name, prompt=begin, max_tokens=tokens, owner=owner, temperature=0.0, **request)
            )

    await asyncio.gather(*(loop(number) for number in range(streams)))
    return answers


async def chats(world: World, count: int, every_s: float = 2.0, owner: str = "chat", **request: Any) -> list[Answer]:
    asked = []
    for number in range(count):
        begin = prompt(5000 + number)
        asked.append(
            asyncio.create_task(
                world.ask(f"{owner}{number}", prompt=begin, max_tokens=32, owner=owner, temperature=0.0, **request)
            )
        )
        await world.clock.sleep(every_s * (0.7 + 0.6 * (number * 37 % 100) / 100))
    return await asyncio.gather(*asked)


def tokens_per_s(answers: Sequence[Answer], from_s: float, to_s: float) -> float:
    """Return the output tokens a second of answers that ended in between."""
    ended = [a for a in answers if a.ended_s is not None and from_s <= a.ended_s < to_s]
    return sum(len(a.token_ids) for a in ended) / (to_s - from_s)


def rates(
    *floods: tuple[str, int, int], seconds: float = 30.0, tiers: TierSet = TIERS, tier: str = "realtime", **server: Any
) -> list[float]:
    """Return the tokens a second of floods of several keys: name, streams, weight."""

    async def story(world: World) -> list[list[Answer]]:
        loops = [flood(world, owner, n, seconds, tier=tier, weight=weight) for owner, n, weight in floods]
        return await asyncio.gather(*loops)

    return [tokens_per_s(answers, seconds / 4, seconds) for answers in play(story, tiers=tiers, **server)]


async def chats_alone(world: World) -> list[Answer]:
    return await chats(world, 15)


@pytest.mark.parametrize(
    ("cost", "caches_prefixes", "tokens", "most"),
    mostly_full(FLOODS, FLOODS[0]),
)
def test_another_keys_loops_do_not_push_a_chat_aside(
    cost: StepCost, caches_prefixes: bool, tokens: int, most: float
) -> None:
    """A GPU's chat alone has its first token in one step; beside others, it waits for half of one before."""

    async def beside(world: World) -> tuple[list[Answer], float]:
        loops = asyncio.create_task(flood(world, "flood", 100, LEAD_S + 30.0, tokens))
        await world.clock.sleep(LEAD_S)
        asked = await chats(world, 15)
        answers = await loops
        assert all(is_right(answer) for answer in (*asked, *answers))
        return asked, tokens_per_s(answers, LEAD_S, LEAD_S + 30.0)

    server: dict[str, Any] = {"cost": cost, "noise": 0.1, "caches_prefixes": caches_prefixes, "tiers": TIERS}
    single, (asked, rate) = play(chats_alone, **server), play(beside, **server)
    assert at(asked, 0.5) <= most * at(single, 0.5)
    assert at(asked[1:], 0.99) <= 2.5 * at(single, 0.99), "only the first one finds a full server"
    if tokens == 64 and cost is CPU:
        [alone] = rates(("flood", 100, 1), **server)
        assert rate >= 0.55 * alone


def test_two_floods_share_the_server_by_the_weights_of_their_keys() -> None:
    server = {"cost": CPU, "noise": 0.1, "caches_prefixes": True}
    [alone] = rates(("a", 140, 1), **server)
    a, b = rates(("a", 100, 1), ("b", 40, 1), **server)
    assert 0.8 <= a / b <= 1.25 and a + b >= 0.9 * alone
    heavy, light = rates(("a", 40, 3), ("b", 40, 1), **server)
    assert 2.2 <= heavy / light <= 4.0


def test_a_key_that_is_alone_again_gets_all() -> None:
    server = {"cost": CPU, "noise": 0.1, "caches_prefixes": True, "tiers": TIERS}
    ends_s = QUIET_S + 30.0

    async def story(world: World) -> tuple[float, float]:
        loops = asyncio.create_task(flood(world, "a", 60, ends_s))
        await world.clock.sleep(LEAD_S)
        await chats(world, 3)
        assert any(state.yields for state in world.core.held.table)
        answers = await loops
        return tokens_per_s(answers, 12.0, QUIET_S), tokens_per_s(answers, QUIET_S + 18.0, ends_s)

    beside, again = play(story, **server)
    [alone] = rates(("a", 60, 1), seconds=24.0, **server)
    assert beside <= 0.9 * alone
    assert again >= 0.95 * alone


def test_a_higher_tier_is_protected_from_a_lower_ones_flood_and_starves_no_few() -> None:
    gold = {"priority": 200, "max_slowdown": 1.25, "slo": {"ttft_p99_ms": 300, "itl_p99_ms": 60}}
    server = {"cost": CPU, "noise": 0.1, "caches_prefixes": True, "tiers": make_tiers(realtime=ROOMY, gold=gold)}

    async def alone(world: World) -> list[Answer]:
        return await chats(world, 15, 1.0, tier="gold")

    async def beside(world: World) -> list[Answer]:
        loops = asyncio.create_task(flood(world, "flood", 64, LEAD_S + 15.0))
        await world.clock.sleep(LEAD_S)
        asked = await chats(world, 15, 1.0, tier="gold")
        await loops
        return asked

    async def two_tiers(world: World) -> list[Answer]:
        busy = asyncio.create_task(chats(world, 60, 0.25, tier="gold"))
        asked = await chats(world, 7, 2.0, "silver")
        await busy
        return asked

    assert at(play(beside, **server), 0.5) <= 2.0 * at(play(alone, **server), 0.5)
    assert at(play(two_tiers, **server), 0.99) <= 0.5
