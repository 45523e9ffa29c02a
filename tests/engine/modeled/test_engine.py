"""The modeled engine: blocks and rules are those of the native engine, times are those of its cost."""

import math
from dataclasses import replace
from typing import Any

import pytest

from engine.interface import (
    EngineInfo,
    NewSequence,
    Preempt,
    PreemptionMode,
    Run,
    SamplingParams,
    StepPlan,
    StepResult,
)
from engine.modeled.engine import FIRST_ORDINARY_TOKEN, ModeledEngine, modeled_token
from engine.step_time.cost import StepCost

INFO = EngineInfo("m", max_model_len=64, vocab_size=100, block_size=4, num_blocks=20, max_step_tokens=50)
COST = StepCost(step_s=1.0, prefill_token_s=0.1, attend_s=0.0, context_token_s=0.0, decode_s=0.01)
SWAPPING = replace(INFO, preemption_modes=("pause", "swap", "recompute"), num_swap_blocks=8, swap_block_s=0.25)
PAUSE, SWAP, RECOMPUTE = PreemptionMode.PAUSE, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


class Driver:
    """Runs plans; `slept` is the sum of all waits in seconds."""

    def __init__(self, noise: float = 0.0, info: EngineInfo = INFO, cost: StepCost = COST) -> None:
        self.slept = 0.0
        self.engine = ModeledEngine(info, self._sleep, cost, noise)
        self._next_id = 0

    async def _sleep(self, seconds: float) -> None:
        self.slept += seconds

    async def step(self, **plan: Any) -> StepResult:
        self._next_id += 1
        self.engine.submit(StepPlan(self._next_id, **plan))
        return await self.engine.collect()

    async def start(self, seq_id: str = "s", prompt: int = 8, **sampling: Any) -> StepResult:
        sampling.setdefault("max_tokens", 10)
        return await self.step(start=(new(seq_id, prompt, **sampling),), run=(Run(seq_id, prompt),))


def new(seq_id: str, prompt: int, **sampling: Any) -> NewSequence:
    return NewSequence(seq_id, (7,) * prompt, SamplingParams(**sampling))


@pytest.mark.parametrize("mode", PreemptionMode)
async def test_preemption_delays_tokens_and_changes_none(mode: PreemptionMode) -> None:
    driver = Driver(info=SWAPPING)
    tokens = list((await driver.start(seed=9)).outputs[0].token_ids)
    tokens += (await driver.step(run=(Run("s", 1),))).outputs[0].token_ids
    used = driver.engine.num_used_blocks
    result = await driver.step(preempt=(Preempt("s", mode),))
    assert driver.engine.num_used_blocks == (used if mode is PAUSE else 0)
    assert driver.engine.num_used_swap_blocks == (3 if mode is SWAP else 0)
    copying_s = 3 * SWAPPING.swap_block_s if mode is SWAP else 0.0
    assert result.elapsed_s == copying_s
    num_tokens = 8 + 2 if mode is RECOMPUTE else 1
    result = await driver.step(resume=("s",), run=(Run("s", num_tokens),))
    assert result.elapsed_s == pytest.approx(copying_s + 1.0 + (1.0 if mode is RECOMPUTE else 0.01))
    assert result.free_swap_blocks == 8
    tokens += result.outputs[0].token_ids
    assert tokens == [modeled_token(9, i, 100) for i in range(3)]


async def test_cached_tokens_take_no_time_and_the_prefix_cache_is_off_by_default() -> None:
    driver = Driver()
    costs = []
    for prefix_cache in (False, True):
        driver.engine = ModeledEngine(INFO, driver._sleep, COST, noise=0.0, prefix_cache=prefix_cache)
        for seq_id in "ab":
            result = await driver.start(seq_id, prompt=10)
            costs.append((result.outputs[0].num_cached_tokens, round(result.elapsed_s, 9)))
    assert costs == [(0, 2.0), (0, 2.0), (0, 2.0), (8, 1.2)]
    assert result.shared_blocks == (("a", 2), ("b", 2))


async def test_a_step_takes_the_time_of_its_work() -> None:
    driver = Driver()
    assert (await driver.start("a", prompt=10)).elapsed_s == pytest.approx(2.0)
    assert (await driver.start("b", prompt=20)).elapsed_s == pytest.approx(3.0)
    result = await driver.step(run=(Run("a", 1), Run("b", 1)))
    assert result.elapsed_s == pytest.approx(1.02)
    assert driver.slept == pytest.approx(6.02)


class RootCost(StepCost):
    """Four times the work takes twice the time."""

    def step(self, work_s: float) -> float:
        return math.sqrt(work_s)


async def test_a_step_costs_what_its_cost_says_of_all_runs_together() -> None:
    driver = Driver(cost=RootCost(prefill_token_s=1.0, decode_s=1.0))
    await driver.start("a", prompt=9)
    assert (await driver.start("b", prompt=16)).elapsed_s == pytest.approx(4.0)
    assert (await driver.step(run=(Run("a", 1), Run("b", 1)))).elapsed_s == pytest.approx(math.sqrt(2))


async def test_noise_depends_on_the_seed() -> None:
    async def times(seed: int) -> list[float]:
        async def no_time(seconds: float) -> None:
            pass

        engine = ModeledEngine(INFO, no_time, COST, noise=0.1, seed=seed)
        elapsed = []
        for i in range(20):
            start = (new("s", 8, max_tokens=50),) if i == 0 else ()
            engine.submit(StepPlan(i, start=start, run=(Run("s", 8 if i == 0 else 1),)))
            elapsed.append((await engine.collect()).elapsed_s)
        return elapsed

    assert await times(1) == await times(1) != await times(2)


async def test_tokens_are_ordinary_and_depend_on_seed_and_position() -> None:
    tokens = [modeled_token(seed, i, 100) for seed in range(-3, 60) for i in range(60)]
    assert min(tokens) >= FIRST_ORDINARY_TOKEN and max(tokens) < 100
    assert len(set(tokens)) > 80
    assert modeled_token(1, 0, 1000) != modeled_token(2, 0, 1000)


async def test_closing_frees_all_sequences() -> None:
    driver = Driver()
    await driver.start()
    driver.engine.close()
    assert driver.engine.num_used_blocks == 0
