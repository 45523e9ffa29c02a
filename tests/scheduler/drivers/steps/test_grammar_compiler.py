"""Grammars are compiled before requests start, on the modeled engine, in virtual time."""

import asyncio
from collections.abc import Callable
from itertools import pairwise

from engine.interface import GRAMMAR_FAILED, GrammarError
from scheduler.request import EventKind
from tests.scheduler.world import World, played_by, run_world

COMPILING_S = 0.5  # far longer than a step


class Compiler:
    """A slow compiler in place of the engine's. It records which grammars it has begun and finished."""

    def __init__(self, world: World) -> None:
        self.begun: list[str] = []
        self.finished: dict[str, float] = {}
        self._world = world
        world.engine.compile_grammar = self.compile  # type: ignore[method-assign]

    async def compile(self, grammar: str) -> object:
        self.begun.append(grammar)
        await self._world.clock.sleep(COMPILING_S)
        if grammar == "bad":
            raise GrammarError(f"{GRAMMAR_FAILED} does not compile: bad")
        self.finished[grammar] = self._world.clock.now()
        return f"compiled {grammar}"


def play(story: Callable[[World, Compiler], object]) -> None:
    async def main(world: World) -> None:
        await story(world, Compiler(world))  # type: ignore[misc]

    run_world(main)


@played_by(play)
async def test_a_request_starts_after_its_grammar_is_compiled_and_others_go_on_meanwhile(
    world: World, compiler: Compiler, /
) -> None:
    stream = asyncio.create_task(world.ask("stream", max_tokens=200))
    await world.clock.sleep(0.1)
    answer = await world.ask("formatted", grammar="a")
    starts = {new.seq_id: (at, new) for at, plan in world.core.plans for new in plan.start}
    at, new = starts["formatted"]
    assert at >= compiler.finished["a"]
    assert new.compiled_grammar == "compiled a"
    assert len(answer.token_ids) == 8
    begun_s = compiler.finished["a"] - COMPILING_S
    steps = [at for at, plan in world.core.plans if begun_s <= at <= compiler.finished["a"]]
    assert len(steps) > 5 and max(b - a for a, b in pairwise(steps)) < COMPILING_S / 5
    await stream


@played_by(play)
async def test_the_grammar_of_the_highest_tier_is_compiled_first(world: World, compiler: Compiler, /) -> None:
    bulk = [asyncio.create_task(world.ask(f"b{i}", "bulk", grammar=f"bulk {i}")) for i in range(3)]
    await world.clock.sleep(COMPILING_S / 2)
    await world.ask("interactive", grammar="interactive")
    await asyncio.gather(*bulk)
    assert compiler.begun.index("interactive") == 1
    assert sorted(compiler.begun) == ["bulk 0", "bulk 1", "bulk 2", "interactive"]


@played_by(play)
async def test_a_grammar_that_does_not_compile_fails_its_request_before_it_starts(
    world: World, compiler: Compiler, /
) -> None:
    bad, good = await asyncio.gather(world.ask("bad", grammar="bad"), world.ask("good", grammar="good"))
    (event,) = bad.events
    assert (event.kind, event.error.startswith(GRAMMAR_FAILED)) == (EventKind.FAILED, True)
    assert len(good.token_ids) == 8
    assert [new.seq_id for _, plan in world.core.plans for new in plan.start] == ["good"]


@played_by(play)
async def test_a_request_cancelled_while_its_grammar_is_compiled_never_starts(
    world: World, compiler: Compiler, /
) -> None:
    async with await world.submit(world.request("gone", grammar="a")):
        await world.clock.sleep(COMPILING_S / 2)
        assert len(world.core.held) == 1
    await world.ask("other")
    await world.clock.sleep(COMPILING_S)
    assert compiler.begun == ["a"]
    assert len(world.core.held) == 0
    assert [new.seq_id for _, plan in world.core.plans for new in plan.start] == ["other"]
