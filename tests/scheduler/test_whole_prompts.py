"""An engine that computes each prompt in one step, such as one for embeddings: no text is cut, and bulk delays an
interactive text by no more than the batch that runs when it comes."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from engine.step_time.cost import StepCost
from tests.scheduler.builders import make_info, make_tiers
from tests.scheduler.world import World, played_by, run_world

COST = StepCost(step_s=0.004, prefill_token_s=0.0002, attend_s=0.0, context_token_s=0.0, decode_s=0.0002)
STEP_TOKENS = 1024
INFO = make_info(whole_prompts=True, max_step_tokens=STEP_TOKENS, max_model_len=2000)


async def _ingest(world: World, lengths: list[int]) -> list[asyncio.Task[object]]:
    """Send bulk texts of these lengths, each of which ends with the one token that stands for its vector."""
    asks = [asyncio.create_task(world.ask(f"b{i}", "bulk", n, 1)) for i, n in enumerate(lengths)]
    await world.settle()
    return asks  # type: ignore[return-value]


def _assert_whole(world: World) -> None:
    prompts = {request_id: len(a.request.prompt_token_ids) for request_id, a in world.answers.items()}
    for _, plan in world.core.plans:
        assert all(run.num_tokens == prompts[run.seq_id] for run in plan.run), "a text was cut"
        assert plan.num_tokens <= STEP_TOKENS or len(plan.run) == 1


@played_by(run_world, known=COST, cost=COST, info=INFO)
async def test_bulk_delays_an_interactive_text_by_one_batch_at_most(world: World) -> None:
    bulk = await _ingest(world, [100] * 400)
    await world.clock.sleep(0.5)
    waits = []
    for i in range(20):
        await world.clock.sleep(0.0137)  # at another moment of a batch each time
        answer = await world.ask(f"query {i}", "realtime", 20, 1)
        waits.append(answer.ttft_s)
    longest_s = max(result.elapsed_s for result in world.core.results)
    assert max(waits) <= 2 * longest_s, "the batch that ran, and its own"
    await asyncio.gather(*bulk)
    _assert_whole(world)
    for i in range(20):
        assert sum(run.seq_id == f"query {i}" for _, plan in world.core.plans for run in plan.run) == 1


async def _mean_batch(world: World, lengths: list[int]) -> float:
    """Return the mean number of tokens in the batches of these bulk texts."""
    await asyncio.gather(*await _ingest(world, lengths))
    _assert_whole(world)
    sizes = [plan.num_tokens for _, plan in world.core.plans if plan.run]
    return sum(sizes) / len(sizes)


@played_by(run_world, known=COST, cost=COST, info=INFO)
async def test_a_batch_of_bulk_is_worth_its_fixed_cost(world: World) -> None:
    worth = COST.step_s / COST.prefill_token_s
    assert await _mean_batch(world, [4] * 600) > 0.9 * worth


@played_by(
    run_world,
    known=COST,
    cost=COST,
    info=INFO,
    tiers=make_tiers(realtime={"max_slowdown": None, "slo": {"ttft_p99_ms": 5000}}),
)
async def test_batches_are_full_where_chats_may_wait_for_them(world: World) -> None:
    assert await _mean_batch(world, [100] * 200) > 0.8 * STEP_TOKENS


@played_by(run_world, known=COST, cost=COST, info=INFO, tiers=make_tiers(bulk={"floor": 0.1}))
async def test_a_text_longer_than_a_batch_has_its_turn_beside_a_stream_of_others(world: World) -> None:
    async def chatter() -> None:
        for i in range(400):
            asked.append(asyncio.create_task(world.ask(f"query {i}", "realtime", 64, 1)))
            await world.clock.sleep(0.02)

    asked: list[asyncio.Task[object]] = []
    talking = asyncio.create_task(chatter())
    await world.clock.sleep(0.1)
    [long] = await _ingest(world, [STEP_TOKENS + 500])
    async with asyncio.timeout(10):
        await long
    talking.cancel()
    await asyncio.gather(*asked)
    _assert_whole(world)


@given(st.lists(st.integers(1, 1900), min_size=1, max_size=12), st.lists(st.integers(1, 600), max_size=6))
def test_all_texts_end_whole_whatever_their_lengths(bulk: list[int], interactive: list[int]) -> None:
    async def story(world: World) -> None:
        asks = await _ingest(world, bulk)
        answers = [await world.ask(f"query {i}", "realtime", n, 1) for i, n in enumerate(interactive)]
        await asyncio.gather(*asks)
        assert all(len(answer.token_ids) == 1 for answer in answers)
        _assert_whole(world)

    run_world(story, known=COST, cost=COST, info=INFO)
