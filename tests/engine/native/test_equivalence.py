"""The engine's specification: whatever the schedule, the tokens are those of `model.generate` in fp32."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import PreemptionMode
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.drive import drive, make_new, random_chunks, random_preemption
from tests.engine.models import ARCHITECTURES, CONFIGS, VOCAB_SIZE, generate, save_model

MAX_TOKENS = 16


def make_prompts(rng: random.Random, count: int = 5) -> dict[str, tuple[int, ...]]:
    return {f"s{i}": tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 30))) for i in range(count)}


@pytest.fixture(scope="module")
def expected(model_directory: ModelDirectory) -> dict[str, dict[str, tuple[int, ...]]]:
    """The tokens of `generate`, by model and sequence."""
    prompts = make_prompts(random.Random(3))
    return {
        name: {k: generate(model_directory(name)[1], p, MAX_TOKENS) for k, p in prompts.items()} for name in CONFIGS
    }


SCHEDULES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "whole prefill, all at once": lambda rng: {},
    "one at a time": lambda rng: {"arrivals_a_step": 1},
    "chunked prefill mixed with decodes": lambda rng: {"chunk": random_chunks(rng, 7), "arrivals_a_step": 1},
    "token by token": lambda rng: {"chunk": lambda s: 1},
    "paused at random steps": lambda rng: {
        "chunk": random_chunks(rng, 11),
        "preempt": random_preemption(rng, 0.3, PreemptionMode.PAUSE),
    },
    "recomputed at random steps": lambda rng: {
        "chunk": random_chunks(rng, 11),
        "preempt": random_preemption(rng, 0.15, PreemptionMode.RECOMPUTE),
    },
    "paused and recomputed": lambda rng: {
        "chunk": random_chunks(rng, 5),
        "preempt": random_preemption(rng, 0.2, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE),
        "arrivals_a_step": 2,
    },
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(
    name: str, schedule: str, make_engine: MakeEngine, expected: dict[str, dict[str, tuple[int, ...]]]
) -> None:
    prompts = make_prompts(random.Random(3))
    news = [make_new(k, p, max_tokens=MAX_TOKENS) for k, p in prompts.items()]
    driven = drive(make_engine(name), news, **SCHEDULES[schedule](random.Random(5)))
    assert {k: tuple(d.output) for k, d in driven.items()} == expected[name]


def test_the_models_do_not_repeat_one_token(expected: dict[str, dict[str, tuple[int, ...]]]) -> None:
    """Guards the tests above: a model that repeats one token would pass with any attention."""
    for name, outputs in expected.items():
        assert len(set(sum(outputs.values(), ()))) > 5, name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_gives_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    """One schedule with prefill chunks, decodes, arrivals, and two ways of preemption."""
    model = save_model(tmp_path, ARCHITECTURES[name]())
    engine = build_torch_engine(
        EngineConfig(str(tmp_path), dtype="float32", device="cpu", block_size=4, max_num_seqs=16)
    )
    prompts = make_prompts(random.Random(3), count=4)
    rng = random.Random(5)
    preempt = random_preemption(rng, 0.2, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
    news = [make_new(k, p, max_tokens=10, ignore_eos=True) for k, p in prompts.items()]
    driven = drive(engine, news, random_chunks(rng, 9), preempt, arrivals_a_step=2)
    expected = {k: generate(model, p, 10) for k, p in prompts.items()}
    assert {k: tuple(d.output) for k, d in driven.items()} == expected
    assert len(set(sum(expected.values(), ()))) > 5, "a model that repeats one token would pass with any attention"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_mostly_agrees_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Optimizations for bfloat16 only must hold for every architecture, too; the first tokens are compared."""
    model = save_model(tmp_path, ARCHITECTURES[name]())
    engine = build_torch_engine(
        EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu", block_size=4, max_num_seqs=16)
    )
    prompts = make_prompts(random.Random(4), count=12)
    driven = drive(engine, [make_new(k, p, max_tokens=2, ignore_eos=True) for k, p in prompts.items()])
    assert all(d.failure is None and len(d.output) == 2 for d in driven.values())
    with torch.inference_mode():
        first = {k: int(model(torch.tensor([p])).logits[0, -1].argmax()) for k, p in prompts.items()}
    assert sum(driven[k].output[0] == token_id for k, token_id in first.items()) >= 8


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_decode_groups_of_very_different_contexts(
    name: str, make_engine: MakeEngine, model_directory: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes split into several groups, in an order that is not the plan's."""
    monkeypatch.setattr("engine.native.batch.packing._PADDED_TOKENS_WORTH_A_GROUP", 16)
    rng = random.Random(9)
    lengths = [3, 60, 7, 40, 100, 5]
    prompts = [tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(n)) for n in lengths]
    driven = drive(make_engine(name), [make_new(str(i), p) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert tuple(driven[str(i)].output) == generate(model_directory(name)[1], prompt, 8)


def test_bfloat16_mostly_agrees_with_fp32(make_engine: MakeEngine, model_directory: ModelDirectory) -> None:
    """Rounding may decide a near tie otherwise, and change every token after it; the first tokens are compared."""
    prompts = make_prompts(random.Random(4), count=12)
    news = [make_new(k, p, max_tokens=1) for k, p in prompts.items()]
    driven = drive(make_engine(dtype="bfloat16"), news)
    agreeing = sum(tuple(driven[k].output) == generate(model_directory("llama")[1], p, 1) for k, p in prompts.items())
    assert agreeing >= 10
