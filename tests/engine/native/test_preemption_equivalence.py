"""Preemption and the prefix cache change no token: sequences that share their beginnings, arrive at different steps and
are preempted in every way at random steps give the tokens of `generate` in fp32."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from engine.interface import PreemptionMode, StepResult
from engine.native.batch.packing import StepBatch
from engine.native.execution.torch_engine import TorchEngine
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.drive import drive, make_new, random_chunks, random_preemption
from tests.engine.models import CONFIGS, VOCAB_SIZE, generate

MODES = tuple(PreemptionMode)
MAX_TOKENS = 10
SWAP_BYTES = 1 << 20

Prompts = dict[str, tuple[int, ...]]


def family(seed: int, count: int = 7) -> Prompts:
    """Return prompts that begin with 0 to 24 tokens of a common one, and the common one twice."""
    rng = random.Random(seed)
    trunk = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(24))
    prompts = {"trunk": trunk, "again": trunk}
    for i in range(count - 2):
        tail = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 9)))
        prompts[f"s{i}"] = trunk[: rng.randint(0, 24)] + tail
    return prompts


@pytest.fixture(scope="module")
def expected(model_directory: ModelDirectory) -> dict[str, Prompts]:
    return {
        name: {k: generate(model_directory(name)[1], p, MAX_TOKENS) for k, p in family(1).items()} for name in CONFIGS
    }


def watch(engine: TorchEngine) -> Callable[[StepResult], None]:
    """Return a check that blocks are conserved after every step (law 2)."""

    def check(result: StepResult) -> None:
        assert result.free_blocks + engine.num_used_blocks == engine.info.num_blocks
        assert result.free_swap_blocks + engine.num_used_swap_blocks == engine.info.num_swap_blocks

    return check


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(
    name: str, seed: int, make_engine: MakeEngine, expected: dict[str, Prompts]
) -> None:
    engine = make_engine(name, swap_bytes=SWAP_BYTES)
    rng = random.Random(seed)
    news = [make_new(k, p, max_tokens=MAX_TOKENS) for k, p in family(1).items()]
    rng.shuffle(news)
    preempt = random_preemption(rng, 0.25, *MODES)
    driven = drive(engine, news, random_chunks(rng, 9), preempt, arrivals_a_step=1, after_step=watch(engine))
    assert {k: tuple(d.output) for k, d in driven.items()} == expected[name]
    assert sum(d.num_cached for d in driven.values()) > 0
    assert (engine.num_used_blocks, engine.num_used_swap_blocks) == (0, 0)


# -- a hit skips work --------------------------------------------------------------------------------------------------


@pytest.fixture
def count_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[TorchEngine], list[int]]:
    """Record the number of tokens in each forward pass of an engine."""

    def watch_passes(engine: TorchEngine) -> list[int]:
        rows: list[int] = []
        run = engine._runner.run

        def counted(batch: StepBatch, **more: Any) -> Tensor | None:
            rows.append(batch.num_rows)
            return run(batch, **more)

        monkeypatch.setattr(engine._runner, "run", counted)
        return rows

    return watch_passes


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt2"])
def test_a_hit_skips_work_and_changes_no_token(
    name: str, make_engine: MakeEngine, count_rows: Callable[[TorchEngine], list[int]]
) -> None:
    engine = make_engine(name)
    rows = count_rows(engine)
    prompt = range(1, 31)
    first = drive(engine, [make_new("first", prompt)])["first"]
    assert (first.num_cached, rows) == (0, [30] + [1] * 7)
    rows.clear()
    second = drive(engine, [make_new("second", prompt)])["second"]
    assert (second.num_cached, rows) == (28, [2] + [1] * 7), "seven full blocks are not computed again"
    assert second.output == first.output
    third = drive(engine, [make_new("third", [*prompt, *first.output[:5]], max_tokens=3)])["third"]
    assert third.num_cached == 32, "generated tokens are cached, too"
    assert third.output == first.output[5:8]


def test_the_cache_can_be_turned_off(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    for name in ("first", "second"):
        assert drive(engine, [make_new(name, range(1, 31))])[name].num_cached == 0
