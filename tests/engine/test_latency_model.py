"""The step-time model: what it learns, from what, and what must not disturb it."""

import random
from collections.abc import Callable

import pytest

from engine.interface import EngineInfo, NewSequence, Run, SamplingParams, StepPlan
from engine.latency_model import StepCost, StepTimeModel, StepWork
from engine.modeled_engine import ModeledEngine

TRUTH = StepCost(step_s=0.02, prefill_token_s=0.0004, attend_s=1e-7, context_token_s=1e-6, decode_s=0.0006)
MAX_LEN = 100_000


def make_work(*runs: tuple[int, int]) -> StepWork:
    """Of runs as (tokens, context)."""
    work = StepWork()
    for num_tokens, context in runs:
        work.add(num_tokens, context)
    return work


def duration(cost: StepCost, *runs: tuple[int, int]) -> float:
    return cost.step_s + sum(cost.run(n, c) for n, c in runs)


Mix = Callable[[random.Random], list[tuple[int, int]]]


def mixed(rng: random.Random) -> list[tuple[int, int]]:
    decodes = [(1, rng.randint(10, 900)) for _ in range(rng.randint(0, 60))]
    chunks = [(rng.randint(16, 400), rng.randint(0, 900)) for _ in range(rng.randint(0, 2))]
    return decodes + chunks or [(1, 10)]


def decodes_only(rng: random.Random) -> list[tuple[int, int]]:
    return [(1, 300)] * 32


def teach(
    model: StepTimeModel, truth: StepCost, steps: int, mix: Mix = mixed, noise: float = 0.05, seed: int = 1
) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        runs = mix(rng)
        model.observe(make_work(*runs), duration(truth, *runs) * max(0.1, rng.gauss(1.0, noise)))


def error(model: StepTimeModel, truth: StepCost, mix: Mix = mixed) -> float:
    """Mean of |predicted ÷ true − 1| on fresh steps."""
    rng = random.Random(99)
    steps = [mix(rng) for _ in range(200)]
    return sum(abs(model.predict(make_work(*r)) / duration(truth, *r) - 1) for r in steps) / len(steps)


async def test_it_learns_the_modeled_engine_from_its_steps() -> None:
    """Through the interface: nothing but plans and results."""

    async def no_time(seconds: float) -> None:
        pass

    engine = ModeledEngine(EngineInfo("m", MAX_LEN, 1000, 16, 10_000, 4096), no_time, TRUTH, noise=0.05)
    model, rng = StepTimeModel(), random.Random(3)
    known: dict[str, tuple[int, int]] = {}  # id: (computed, tokens)
    for step in range(400):
        start: tuple[NewSequence, ...] = ()
        if step % 3 == 0 and len(known) < 40:
            start = (NewSequence(f"s{step}", (5,) * rng.randint(16, 600), SamplingParams(max_tokens=MAX_LEN)),)
            known[f"s{step}"] = (0, len(start[0].prompt_token_ids))
        runs, work = [], StepWork()
        for seq_id, (computed, total) in known.items():
            num_tokens = min(total - computed, 256)
            runs.append(Run(seq_id, num_tokens))
            work.add(num_tokens, computed)
        engine.submit(StepPlan(step, start=start, run=tuple(runs)))
        result = await engine.collect()
        for output in result.outputs:
            total = known[output.seq_id][1] + len(output.token_ids)
            known[output.seq_id] = (output.num_computed_tokens, total)
        model.observe(work, result.elapsed_s)
    assert error(model, TRUTH) < 0.05
    learned = model.cost()
    assert learned.step_s == pytest.approx(TRUTH.step_s, rel=0.15)
    assert learned.prefill_token_s == pytest.approx(TRUTH.prefill_token_s, rel=0.15)


@pytest.mark.parametrize("speed", [0.1, 1.0, 20.0], ids=["GPU", "as it is", "slow CPU"])
def test_it_learns_any_engine_within_a_few_steps(speed: float) -> None:
    truth = StepCost(*(getattr(TRUTH, k) * speed for k in TRUTH.__dataclass_fields__))
    model = StepTimeModel()
    teach(model, truth, 200)
    assert error(model, truth) < 0.10
    assert model.mean_absolute_error < 0.10


def test_it_follows_a_drift() -> None:
    model = StepTimeModel()
    teach(model, TRUTH, 500)
    for factor in (1.3, 0.7):
        drifted = StepCost(*(getattr(TRUTH, k) * factor for k in TRUTH.__dataclass_fields__))
        teach(model, drifted, 1000)
        assert error(model, drifted) < 0.05


def test_steps_that_look_alike_for_long_neither_blow_it_up_nor_make_it_forget() -> None:
    model = StepTimeModel()
    teach(model, TRUTH, 500)
    before = error(model, TRUTH)
    teach(model, TRUTH, 5_000, decodes_only)
    assert error(model, TRUTH, decodes_only) < 0.02
    assert error(model, TRUTH) < before + 0.10, "what a prefill costs was not forgotten"


def test_a_kind_of_work_much_slower_than_believed_is_learned_and_not_taken_for_outliers() -> None:
    """Warm from decodes only, on an engine whose prefill is 15 times slower than the prior."""
    slow = StepCost(step_s=0.02, prefill_token_s=0.003, attend_s=0.0, context_token_s=0.0, decode_s=0.0002)
    model = StepTimeModel()
    teach(model, slow, 100, decodes_only)

    def both(rng: random.Random) -> list[tuple[int, int]]:
        return [(400, 0)] if rng.random() < 0.2 else [(1, 300)] * 32

    teach(model, slow, 200, both)
    assert error(model, slow, both) < 0.10


def test_a_page_fault_does_not_move_it() -> None:
    model = StepTimeModel()
    teach(model, TRUTH, 500)
    before = model.predict(make_work((1, 300)))
    model.observe(make_work((1, 300)), 60.0)
    teach(model, TRUTH, 16, decodes_only, noise=0.0)
    assert model.predict(make_work((1, 300))) == pytest.approx(before, rel=0.10)


def test_no_coefficient_is_ever_negative() -> None:
    model = StepTimeModel()
    for seed in range(20):
        teach(model, TRUTH, 50, noise=0.8, seed=seed)
        assert min(getattr(model.cost(), k) for k in TRUTH.__dataclass_fields__) >= 0


def test_the_cost_carries_a_safety_factor_for_noise_within_bounds() -> None:
    calm, noisy = StepTimeModel(), StepTimeModel()
    teach(calm, TRUTH, 600, noise=0.0)
    teach(noisy, TRUTH, 600, noise=0.2)
    work = [(1, 300)] * 16
    assert duration(calm.cost(), *work) == pytest.approx(duration(TRUTH, *work), rel=0.02)
    assert 1.15 < duration(noisy.cost(), *work) / noisy.predict(make_work(*work)) <= 2.0


def test_before_any_step_the_prior_is_believed() -> None:
    model = StepTimeModel(TRUTH)
    for name in TRUTH.__dataclass_fields__:
        assert getattr(model.cost(), name) == pytest.approx(getattr(TRUTH, name))
    assert model.mean_absolute_error == 0.0


def test_a_chunk_attends_to_its_context_and_to_half_of_itself() -> None:
    cost = StepCost(step_s=0, prefill_token_s=1, attend_s=1, context_token_s=1, decode_s=1)
    assert cost.prefill(10, context=100) == 10 + 10 * (100 + 5)
    assert cost.run(1, 100) == cost.decode(100) == 101
    whole, parts = cost.attend_s * 20 * 10, sum(10 * (c + 5) for c in (0, 10))
    assert whole == parts, "cutting a prefill changes nothing about what it attends to"
