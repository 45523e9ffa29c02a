"""The laws of the scheduler, as properties of the shipped loop, core and controller on random traffic.

`CheckedCore` asserts conservation, blocks and work conservation at every step of every test that uses it. Laws that can
only be checked at the end are asserted here.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface import FinishReason, StepEnd
from scheduler.request import Receipt
from scheduler.request_state import RequestState
from tests.scheduler.builders import FAST, MAX_PREEMPTIONS, NO_PERIOD, expected_tokens, fixed, make_info, make_tiers
from tests.scheduler.world import Answer, World, run_world

TIERS = ("realtime", "bulk", "batch")
MAX_BATCH_SIZE = 8
law = settings(max_examples=settings().max_examples // 2)


@dataclass(frozen=True)
class Arrival:
    after_ms: int
    tier: str
    prompt: int
    max_tokens: int
    cancelled_after_ms: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True)
class Traffic:
    arrivals: tuple[Arrival, ...]
    num_blocks: int
    max_step_tokens: int
    batch_size: int
    seed: int
    prefix_cache: bool = False
    num_swap_blocks: int = 0
    swap_block_s: float = 0.0
    suspends_steps: bool = True
    period: int = NO_PERIOD  # of the outputs: with one, drafts from them are right


ARRIVAL = st.builds(
    Arrival,
    after_ms=st.integers(0, 120),
    tier=st.sampled_from(TIERS),
    prompt=st.integers(1, 180),
    max_tokens=st.integers(1, 40),
    cancelled_after_ms=st.none() | st.none() | st.integers(0, 400),
    cache_salt=st.sampled_from(("", "", "another's")),
)
TRAFFIC = st.builds(
    Traffic,
    arrivals=st.lists(ARRIVAL, min_size=1, max_size=20).map(tuple),
    num_blocks=st.integers(16, 60),  # 16 hold one sequence of the greatest length
    max_step_tokens=st.sampled_from((24, 64, 256, 1024)),
    batch_size=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    prefix_cache=st.booleans(),  # all prompts begin alike: most blocks are shared
    num_swap_blocks=st.sampled_from((0, 6, 40)),
    swap_block_s=st.sampled_from((1e-6, 5e-4)),
    suspends_steps=st.booleans(),
    period=st.sampled_from((NO_PERIOD, 5, 12)),
)


def play(traffic: Traffic) -> World:
    batch_size = {"min": 1, "start": traffic.batch_size, "max": MAX_BATCH_SIZE}
    tiers = make_tiers(**{name: {"batch_size": batch_size} for name in TIERS})
    modes = ("pause", "swap", "recompute") if traffic.num_swap_blocks else ("pause", "recompute")
    info = make_info(
        num_blocks=traffic.num_blocks,
        max_step_tokens=traffic.max_step_tokens,
        max_model_len=16 * 16,
        preemption_modes=modes,
        num_swap_blocks=traffic.num_swap_blocks,
        swap_block_s=traffic.swap_block_s,
        suspends_steps=traffic.suspends_steps,
        verifies_drafts=True,
    )

    async def story(world: World) -> World:
        tasks = []
        for i, arrival in enumerate(traffic.arrivals):
            await world.clock.sleep(arrival.after_ms / 1000)
            tasks.append(asyncio.create_task(_ask(world, f"{arrival.tier}-{i}", arrival)))
        await asyncio.gather(*tasks)
        await world.clock.sleep(0.5)  # aborts of cancelled sequences
        return world

    more = {"prefix_cache": traffic.prefix_cache, "period": traffic.period}
    return run_world(story, tiers=tiers, info=info, noise=0.1, seed=traffic.seed, **more)


async def _ask(world: World, request_id: str, arrival: Arrival) -> None:
    more = {"cache_salt": arrival.cache_salt, "wants_receipt": True}
    asked = world.ask(request_id, arrival.tier, arrival.prompt, arrival.max_tokens, **more)
    if arrival.cancelled_after_ms is None:
        await asked
        return
    task = asyncio.create_task(asked)
    await world.clock.sleep(arrival.cancelled_after_ms / 1000)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@law
@given(TRAFFIC)
def test_the_laws_hold_on_random_traffic(traffic: Traffic) -> None:
    world = play(traffic)
    assert_everything_ended(world)
    assert_causality(world.core.lives)
    assert_steps_stay_in_their_limits(world, traffic)
    num_served = sum(a.cancelled_after_ms is None for a in traffic.arrivals)
    answers = [a for a in world.answers.values() if a.ended_s is not None]
    assert len(answers) >= num_served
    for answer in answers:
        assert_output_unchanged(answer, traffic.period)
        assert_receipt_adds_up(answer)


def test_the_laws_hold_in_full_memory_with_sharing_swaps_and_cancels() -> None:
    """The same laws where KV blocks are always short; asserts also that each kind of event really happened."""
    modes: Counter[str] = Counter()
    num_hits = num_exhausted = num_cancelled = num_paused = num_told = num_preemptions = 0
    ends: Counter[StepEnd] = Counter()
    for seed in range(4):
        world = play(_flood(random.Random(seed)))
        assert_everything_ended(world)
        for answer in world.answers.values():
            if answer.ended_s is not None:
                assert_output_unchanged(answer)
                receipt = assert_receipt_adds_up(answer)
                num_paused += receipt.paused_ms > 0
                num_told += receipt.preemptions
        num_preemptions += sum(world.core.planner.preemptions.values())
        modes.update({mode: count for (_, mode), count in world.core.planner.preemptions.items()})
        ends.update(result.end for result in world.core.results)
        num_hits += sum(bool(life.num_cached_tokens) for life in world.core.lives)
        num_exhausted += sum(life.num_preemptions == MAX_PREEMPTIONS for life in world.core.lives)
        num_cancelled += world.core.held.counts["cancelled"]
    assert min(modes[mode] for mode in ("pause", "swap", "recompute")) > 0
    assert min(ends[end] for end in StepEnd) > 0
    assert min(num_hits, num_exhausted, num_cancelled, num_paused) > 0
    assert num_paused <= num_told <= num_preemptions, "receipts count preemptions; cancelled requests give none"


def _flood(rng: random.Random) -> Traffic:
    arrivals = [
        Arrival(
            after_ms=rng.randint(0, 20),
            tier=rng.choice(TIERS),
            prompt=rng.randint(1, 180),
            max_tokens=rng.randint(1, 70),
            cancelled_after_ms=rng.choice((None, None, None, rng.randint(0, 400))),
            cache_salt=rng.choice(("", "another's")),
        )
        for _ in range(30)
    ]
    return Traffic(
        arrivals=tuple(arrivals),
        num_blocks=rng.randint(16, 30),
        max_step_tokens=rng.choice((64, 256)),
        batch_size=8,
        seed=rng.getrandbits(32),
        prefix_cache=True,
        num_swap_blocks=rng.choice((6, 40)),
        swap_block_s=1e-6,
    )


def assert_everything_ended(world: World) -> None:
    """Laws 1 and 2."""
    counts = world.core.held.counts
    assert counts["accepted"] == counts["finished"] + counts["cancelled"]
    assert len(world.core.held) == 0
    assert (world.engine.num_used_blocks, world.engine.num_used_swap_blocks) == (0, 0)
    assert not world.queue._shared.records


def assert_causality(lives: list[RequestState]) -> None:
    """Law 3: arrived ≤ claimed ≤ first scheduled ≤ first token ≤ last token ≤ ended."""
    for life in lives:
        assert life.arrived_s <= life.claimed_s + 0.001, "arrivals are in whole milliseconds"
        times = (life.claimed_s, life.first_scheduled_s, life.first_token_s, life.last_token_s, life.ended_s)
        happened = [t for t in times if t is not None]
        assert happened == sorted(happened)


def assert_receipt_adds_up(answer: Answer) -> Receipt:
    """Law 3, as a client sees it: the times of the receipt follow each other from the arrival to the last token."""
    receipts = [event.receipt for event in answer.events if event.receipt is not None]
    assert len(receipts) == len(answer.events), "every event has one, since any of them may be the last that is read"
    receipt = receipts[-1]
    assert answer.ended_s is not None
    assert min(receipt.queue_ms, receipt.prefill_ms, receipt.decode_ms, receipt.paused_ms) >= 0
    total_ms = 1000 * (answer.ended_s - answer.submitted_s)
    parts_ms = receipt.queue_ms + receipt.prefill_ms + receipt.decode_ms
    assert abs(parts_ms - total_ms) <= 1.1, "arrivals are in whole milliseconds"
    assert receipt.paused_ms <= receipt.prefill_ms + receipt.decode_ms + 0.01
    return receipt


def assert_steps_stay_in_their_limits(world: World, traffic: Traffic) -> None:
    for _, plan in world.core.plans:
        assert plan.num_tokens <= traffic.max_step_tokens
        for tier in TIERS:
            assert sum(run.seq_id.startswith(tier) for run in plan.run) <= MAX_BATCH_SIZE


def assert_output_unchanged(answer: Answer, period: int = NO_PERIOD) -> None:
    """Law 9: neither pauses, recomputation, drafts nor the cancels of others change an output."""
    assert answer.token_ids == expected_tokens(answer.request, period)
    assert answer.finish_reason is FinishReason.LENGTH


@settings(max_examples=settings().max_examples // 8)
@given(TRAFFIC)
def test_the_same_seed_gives_the_same_trace(traffic: Traffic) -> None:
    """Law 5."""
    first, second = play(traffic).core.trace(), play(traffic).core.trace()
    assert first or all(a.cancelled_after_ms is not None for a in traffic.arrivals)
    assert first == second


PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 180), st.integers(1, 30)), min_size=1, max_size=10)


@law
@given(
    pairs=PAIRS,
    num_blocks=st.integers(16, 60),
    size=st.integers(1, 8),
    higher=st.sampled_from(("realtime", "bulk")),
    prefix_cache=st.booleans(),
)
def test_of_equal_requests_the_higher_tier_never_starts_later(
    pairs: list[tuple[int, int, int]], num_blocks: int, size: int, higher: str, prefix_cache: bool
) -> None:
    """Law 8, for tiers that differ only in priority and SLO."""
    same = {"batch_size": fixed(size), "floor": 0, "deadline_ms": 10_000, "max_wait_ms": fixed(0)}
    lower = "bulk" if higher == "realtime" else "batch"

    async def story(world: World) -> None:
        tasks = []
        for i, (after_ms, prompt, max_tokens) in enumerate(pairs):
            await world.clock.sleep(after_ms / 1000)
            for tier in (lower, higher):
                tasks.append(asyncio.create_task(world.ask(f"{tier}-{i}", tier, prompt, max_tokens)))
        await asyncio.gather(*tasks)
        for i in range(len(pairs)):
            high, low = world.core.life(f"{higher}-{i}"), world.core.life(f"{lower}-{i}")
            assert high.first_scheduled_s is not None and low.first_scheduled_s is not None
            assert high.first_scheduled_s <= low.first_scheduled_s

    tiers = make_tiers(**{name: same for name in TIERS})
    info = make_info(num_blocks=num_blocks, max_model_len=16 * 16)
    run_world(story, tiers=tiers, info=info, known=FAST, prefix_cache=prefix_cache)


def test_bulk_gets_its_min_share_under_an_endless_flood_of_interactive_requests() -> None:
    """Law 7. Interactive requests arrive faster than the engine serves them, so one always awaits its first token."""

    async def story(world: World) -> tuple[float, float]:
        await world.clock.sleep(0.05)
        flood = [asyncio.create_task(_endless(world, i)) for i in range(30)]
        bulk = [asyncio.create_task(world.ask(f"bulk-{i}", "bulk", 64, 400)) for i in range(8)]
        await world.clock.sleep(30)
        share = _time_share(world, "bulk")
        longest = _longest_gap(world, "bulk")
        for task in (*flood, *bulk):
            task.cancel()
        await asyncio.gather(*flood, *bulk, return_exceptions=True)
        return share, longest

    tiers = make_tiers(realtime={"queue_limit": 1000}, bulk={"floor": 0.05})
    share, longest_s = run_world(story, tiers=tiers, known=FAST)
    assert 0.045 <= share <= 0.06
    assert longest_s < 10.0


async def _endless(world: World, client: int) -> None:
    for i in range(1_000_000):
        await world.ask(f"realtime-{client}-{i}", prompt=200, max_tokens=20)


def _time_share(world: World, tier: str) -> float:
    """Return the tier's share of engine time."""
    return world.core.held.used_s[tier] / sum(world.core.held.used_s.values())


def _longest_gap(world: World, tier: str) -> float:
    times = [now for now, plan in world.core.plans if any(r.seq_id.startswith(tier) for r in plan.run)]
    return max(b - a for a, b in zip([0.0, *times], [*times, world.clock.now()], strict=True))
