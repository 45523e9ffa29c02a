"""Workers die, and others go on: no output changes, few tokens are computed twice, a deadly request ends alone."""

import asyncio
import random
from contextlib import suppress
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface import EngineInfo
from engine.sequences.sequence import Sequence
from scheduler.drivers.steps.driver import StepDriver
from scheduler.drivers.steps.isolation import COHORT
from scheduler.request import WORKER_DIED, Delivery, EventKind
from scheduler.worker.checkpoints import CHECKPOINT_S, MIN_TOKENS
from tests.scheduler.builders import expected_tokens, fixed, make_info, make_tiers
from tests.scheduler.deaths import Deadly, Succession
from tests.scheduler.world import Answer, World, played_by, run_world

TIERS = make_tiers(bulk={"batch_size": fixed(64)}, batch={"batch_size": fixed(64)})
POISON = 999  # a token that only deadly prompts have


def big_info(**changes: Any) -> EngineInfo:
    return make_info(num_blocks=4000, max_model_len=2048, **changes)


def play(story: Any, is_deadly: Deadly = lambda sequence: False) -> Any:
    """Play `story(world, workers)` with a succession of workers."""

    async def whole(world: World) -> Any:
        workers = Succession(world, is_deadly)
        await workers.kill()  # from now on, the workers can die in deadly steps
        succession = asyncio.create_task(workers.run())
        try:
            return await story(world, workers)
        finally:
            succession.cancel()
            with suppress(asyncio.CancelledError):
                await succession

    return run_world(whole, tiers=TIERS, info=big_info())


async def ask_all(world: World, names: list[str], tier: str = "batch", **more: Any) -> list[Answer]:
    return await asyncio.gather(*(world.ask(name, tier, delivery=Delivery.AT_END, **more) for name in names))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 5)
@given(
    kills_s=st.lists(st.floats(0.01, 6.0), min_size=1, max_size=3),
    deliveries=st.lists(st.sampled_from(Delivery), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_kills_at_any_moment_change_no_output(kills_s: list[float], deliveries: list[Delivery], seed: int) -> None:
    """Law 9 across workers. A stream that saw a repeat or a gap would fail, as would one that ends twice."""
    rng = random.Random(seed)

    async def story(world: World, workers: Succession) -> list[Answer]:
        asked = [
            asyncio.create_task(
                world.ask(f"r{i}", rng.choice(("bulk", "batch")), rng.randint(1, 60), rng.randint(1, 300), delivery=d)
            )
            for i, d in enumerate(deliveries)
        ]
        for after_s in kills_s:
            await world.clock.sleep(after_s)
            await workers.kill()
        return await asyncio.gather(*asked)

    for answer in play(story):
        assert answer.token_ids == expected_tokens(answer.request)
        assert answer.events[-1].kind is EventKind.FINISHED


def test_a_death_costs_seconds_of_work_however_long_a_request_has_run() -> None:
    async def story(world: World, workers: Succession) -> tuple[int, int]:
        asked = asyncio.create_task(ask_all(world, [f"r{i}" for i in range(4)], prompt=40, max_tokens=900))
        await world.clock.sleep(7.3)
        await workers.kill()
        restored = sum(state.num_restored for state in world.core.held.states)
        await asked
        generated = sum(len(life.output_token_ids) - life.num_restored for life in workers.lives)
        return restored, generated - 4 * 900

    restored, num_twice = play(story)
    assert restored > 4 * 400
    assert num_twice <= 4 * (CHECKPOINT_S / 0.01 + MIN_TOKENS), (
        "the tokens since the last checkpoint; a step takes 10 ms"
    )


@pytest.mark.parametrize("tier", ["realtime", "bulk"])
@played_by(play)
async def test_a_worker_that_is_stopped_loses_nothing(world: World, workers: Succession, /, tier: str) -> None:
    asked = asyncio.gather(*(world.ask(d.value, tier, prompt=40, max_tokens=300, delivery=d) for d in Delivery))
    await world.clock.sleep(1.01)
    before = {state.id: len(state.output_token_ids) for state in world.core.held.states}
    assert min(before.values()) > MIN_TOKENS
    world.loop.stop()
    await world.running
    after = {state.id: len(state.output_token_ids) for state in world.core.lives}
    await workers.succeed()
    assert {state.id: state.num_restored for state in world.core.held.states} == after
    assert {state.attempt for state in world.core.held.states} == {1}, "a release is no failed attempt"
    for answer in await asked:
        assert answer.token_ids == expected_tokens(answer.request)


class Gateways:
    """Gateways of a world, one after the other, that ask for the same parts of a job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_asked = 0

    async def ask(self, parts: int, max_tokens: int, delivery: Delivery) -> str:
        """Let a gateway ask for all parts. Return its id."""
        gateway_id, world = f"gateway-{self._num_asked}", self._world
        self._num_asked += 1
        await world.events.open(gateway_id)
        for i in range(parts):
            more = {"delivery": delivery, "job_part": f"part-{i}", "seed": i, "reply_to": gateway_id}
            await world.queue.put([world.request(f"{gateway_id}-{i}", "batch", 40, max_tokens, **more)])
        return gateway_id

    def end(self, gateway_id: str) -> None:
        del self._world.events._inboxes[gateway_id]

    async def ask_to_the_end(self, parts: int, max_tokens: int, delivery: Delivery) -> list[Answer]:
        names = [f"last-{i}" for i in range(parts)]
        more = [{"delivery": delivery, "job_part": f"part-{i}", "seed": i} for i in range(parts)]
        asked = zip(names, more, strict=True)
        return await asyncio.gather(*(self._world.ask(n, "batch", 40, max_tokens, **m) for n, m in asked))


@settings(max_examples=settings().max_examples // 8)
@given(
    ends_s=st.lists(st.tuples(st.floats(0.1, 8.0), st.floats(0.0, 6.0), st.booleans()), min_size=1, max_size=3),
    delivery=st.sampled_from(Delivery),
    max_tokens=st.integers(20, 900),
)
def test_gateways_that_end_at_any_moment_change_no_output(
    ends_s: list[tuple[float, float, bool]], delivery: Delivery, max_tokens: int
) -> None:
    """Each gateway asks for the parts that its predecessor has left, before the worker has noticed its end or later."""

    async def story(world: World, workers: Succession) -> list[Answer]:
        gateways = Gateways(world)
        for lives_s, away_s, worker_dies in ends_s:
            gateway_id = await gateways.ask(4, max_tokens, delivery)
            await world.clock.sleep(lives_s)
            gateways.end(gateway_id)
            if worker_dies:
                await workers.kill()
            await world.clock.sleep(away_s)
        return await gateways.ask_to_the_end(4, max_tokens, delivery)

    for answer in play(story):
        assert answer.token_ids == expected_tokens(answer.request)
        assert answer.events[-1].kind is EventKind.FINISHED


@pytest.mark.parametrize("delivery", [Delivery.EACH_STEP, Delivery.AT_END])
def test_a_gateways_death_costs_no_token_of_a_job_that_the_next_one_asks_for_later(delivery: Delivery) -> None:
    async def story(world: World, workers: Succession) -> tuple[int, int]:
        gateways = Gateways(world)
        gateway_id = await gateways.ask(4, 900, delivery)
        await world.clock.sleep(3.3)
        gateways.end(gateway_id)
        while len(world.core.held):
            await world.clock.sleep(0.1)
        generated = sum(life.num_new_tokens for life in workers.lives)
        await gateways.ask_to_the_end(4, 900, delivery)
        return generated, sum(life.num_new_tokens for life in workers.lives)

    generated, total = play(story)
    assert generated > 4 * 200
    assert total - 4 * 900 <= 4, "at most the tokens of the step in which it was dropped"


@played_by(play)
async def test_a_request_with_log_probabilities_begins_again(world: World, workers: Succession, /) -> None:
    asked = asyncio.create_task(world.ask("r", "batch", 40, 600, delivery=Delivery.AT_END, logprobs=0))
    await world.clock.sleep(CHECKPOINT_S + 1.0)
    await workers.kill()
    assert [state.num_restored for state in world.core.held.states] == [0]
    answer = await asked
    assert answer.token_ids == expected_tokens(answer.request)


@played_by(play)
async def test_a_checkpoint_of_another_engine_is_used_only_where_it_fits(world: World, workers: Succession, /) -> None:
    asked = asyncio.create_task(world.ask("r", "batch", 40, 600, delivery=Delivery.AT_END))
    await world.clock.sleep(CHECKPOINT_S + 1.0)
    world.queue._shared.outputs["r"].token_ids = (5,) * 600
    await workers.kill()
    assert [state.num_restored for state in world.core.held.states] == [0], "it leaves no token to generate"
    answer = await asked
    assert answer.token_ids == expected_tokens(answer.request)


# -- deadly requests ---------------------------------------------------------------------------------------------------


def deadly_from(num_output: int) -> Deadly:
    """Return a rule: a prompt with `POISON` kills the worker once the sequence has so many output tokens."""

    def is_deadly(sequence: Sequence) -> bool:
        return POISON in sequence.token_ids[:1] and sequence.num_output_tokens >= num_output

    return is_deadly


async def ask_deadly(world: World, name: str = "poison", tier: str = "batch", **more: Any) -> Answer:
    return await world.ask(name, tier, (POISON, 5, 6), 200, delivery=Delivery.AT_END, **more)


@pytest.mark.parametrize("num_output", [0, 90])
def test_a_deadly_request_is_given_up_and_innocents_are_not(num_output: int) -> None:
    """It runs in company three times, and alone the fourth time. At most a cohort runs alone with it."""

    async def story(world: World, workers: Succession) -> None:
        innocents = asyncio.create_task(ask_all(world, [f"r{i}" for i in range(24)], prompt=30, max_tokens=120))
        poison = await ask_deadly(world)
        [end] = [event for event in poison.events if event.is_last]
        assert (end.kind, end.code) == (EventKind.FAILED, WORKER_DIED)
        assert workers.deaths == 4
        assert ran_alone(workers, "poison")
        for answer in await innocents:
            assert answer.token_ids == expected_tokens(answer.request)
        assert workers.deaths == 4
        suspects = {life.id for life in workers.lives if life.is_isolated}
        assert "poison" in suspects and len(suspects) <= COHORT

    play(story, deadly_from(num_output))


def ran_alone(workers: Succession, request_id: str) -> bool:
    """Return whether the last step that a request was in had no other request."""
    steps = [plan for plan in workers.plans if any(run.seq_id == request_id for run in plan.run)]
    return len(steps[-1].run) == 1


@played_by(play)
async def test_a_suspect_that_survives_alone_gives_its_whole_output_beside_other_work(
    world: World, workers: Succession, /
) -> None:
    """An isolated request gets every fourth step; other requests go on in the steps between."""
    request = world.request("suspect", "batch", 30, 40)
    stream = await world.submit(request)
    world.queue._shared.records["suspect"].attempt = 3
    others = asyncio.create_task(ask_all(world, [f"r{i}" for i in range(4)], prompt=30, max_tokens=60))
    tokens: list[int] = []
    async with stream:
        async for event in stream:
            tokens += event.token_ids
    assert tokens == expected_tokens(request)
    for answer in await others:
        assert answer.token_ids == expected_tokens(answer.request)
    plans = [plan for _, plan in world.core.plans]
    mixed = [plan for plan in plans if len(plan.run) > 1 and any(run.seq_id == "suspect" for run in plan.run)]
    assert not mixed
    await world.ask("later", max_tokens=1)
    assert not world.queue._shared.alone, "the suspect is not blamed for later deaths"


@played_by(play)
async def test_a_store_that_is_away_before_a_suspects_step_ends_the_loop_and_not_the_worker(
    world: World, workers: Succession, /
) -> None:
    """The next loop goes on with the same core and engine, whose step was submitted all the same."""
    unreachable = AsyncMock(side_effect=ConnectionError)
    world.worker_queue.note_step = unreachable  # type: ignore[method-assign]
    request = world.request("suspect", "batch", 30, 40)
    stream = await world.submit(request)
    world.queue._shared.records["suspect"].attempt = 3
    await asyncio.wait([world.running])
    assert isinstance(world.running.exception(), ConnectionError) and unreachable.await_count == 1
    assert world.core.is_busy
    world.begin_worker(StepDriver(world.core, world.engine), world.engine)
    async with stream:
        tokens = [token async for event in stream for token in event.token_ids]
    assert tokens == expected_tokens(request)
