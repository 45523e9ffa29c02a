"""The engine's specification: whatever the schedule, the tokens are those of `model.generate` in fp32.

Laws 2 and 9: sequences are chunked, arrive at different steps, are preempted in every way, run in suspended steps,
and find each other's prefixes.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import PreemptionMode, StepResult
from engine.native.execution.torch_engine import TorchEngine
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.drive import drive, make_new, random_chunks, random_preemption
from tests.engine.models import ARCHITECTURES, CONFIGS, Prompts, family, generate, make_prompts, save_model
from tests.engine.suspending import Suspending
from tests.marks import mostly_full

MAX_TOKENS = 10
CHUNKS = (100, 1, 5, 9, 11)  # the longest of each schedule; no prompt has 100 tokens
ARRIVALS_A_STEP = (1, 2, 3, 4, None)
PREEMPTIONS: tuple[tuple[float, tuple[PreemptionMode, ...]], ...] = (
    (0.0, ()),
    (0.3, (PreemptionMode.PAUSE,)),
    (0.15, (PreemptionMode.RECOMPUTE,)),
    (0.25, (PreemptionMode.SWAP,)),
    (0.25, tuple(PreemptionMode)),
)
Generated = Callable[[str, Prompts, int], Prompts]


class Schedule(NamedTuple):
    """How sequences run: one choice of each kind."""

    number: int
    longest_chunk: int
    arrivals_a_step: int | None
    preemption: tuple[float, tuple[PreemptionMode, ...]]
    shares_prefixes: bool
    suspends: bool


def pairwise() -> list[tuple[Schedule, str]]:
    """Return 25 schedules and a model for each: any two choices of different kinds meet at least once.

    The rows (a, b, a+b, a+2b, …) modulo 5 are an orthogonal array of strength two.
    """
    rows = []
    for a in range(5):
        for b in range(5):
            preemption, shares, suspends, model = ((a + k * b) % 5 for k in range(1, 5))
            schedule = Schedule(
                5 * a + b, CHUNKS[a], ARRIVALS_A_STEP[b], PREEMPTIONS[preemption], shares % 2 == 0, suspends < 2
            )
            rows.append((schedule, list(CONFIGS)[model + 5 * ((a + b) % 2)]))
    return rows


@pytest.fixture(scope="module")
def generated(model_directory: ModelDirectory) -> Generated:
    """Return a function that gives what transformers generates for a model's name and prompts."""
    known: dict[tuple[str, tuple[int, ...], int], tuple[int, ...]] = {}

    def get(name: str, prompts: Prompts, max_tokens: int) -> Prompts:
        for prompt in prompts.values():
            if (name, prompt, max_tokens) not in known:
                known[name, prompt, max_tokens] = generate(model_directory(name)[1], prompt, max_tokens)
        return {k: known[name, prompt, max_tokens] for k, prompt in prompts.items()}

    return get


def conserved_blocks(engine: TorchEngine) -> Callable[[StepResult], None]:
    """Return a check that blocks are conserved after every step."""

    def check(result: StepResult) -> None:
        assert result.free_blocks + engine.num_used_blocks == engine.info.num_blocks
        assert result.free_swap_blocks + engine.num_used_swap_blocks == engine.info.num_swap_blocks

    return check


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        pytest.param(schedule, name, id=f"{schedule.number}-{name}", marks=() if name == own else pytest.mark.full)
        for schedule, own in pairwise()
        for name in CONFIGS
    ],
)
def test_greedy_tokens_are_those_of_generate(
    schedule: Schedule, name: str, make_engine: MakeEngine, generated: Generated
) -> None:
    rng, engine = random.Random(schedule.number), make_engine(name, swap_bytes=1 << 20)
    prompts = family(1) if schedule.shares_prefixes else make_prompts(random.Random(3))
    news = [make_new(k, p, max_tokens=MAX_TOKENS) for k, p in prompts.items()]
    rng.shuffle(news)
    suspending = Suspending(engine, rng, 0.3 if schedule.suspends else 0.0)
    driven = drive(
        suspending,
        news,
        random_chunks(rng, schedule.longest_chunk),
        random_preemption(rng, schedule.preemption[0], *schedule.preemption[1]),
        schedule.arrivals_a_step,
        conserved_blocks(engine),
    )
    assert {k: tuple(d.output) for k, d in driven.items()} == generated(name, prompts, MAX_TOKENS)
    assert (engine.num_used_blocks, engine.num_used_swap_blocks) == (0, 0)
    assert (suspending.num_suspended >= 3) == schedule.suspends
    if schedule.shares_prefixes and schedule.arrivals_a_step == 1:
        assert sum(d.num_cached for d in driven.values()) > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_the_models_do_not_repeat_one_token(name: str, generated: Generated) -> None:
    """Guards the test above: a model that repeats one token would pass with any attention."""
    assert len(set(sum(generated(name, make_prompts(random.Random(3)), MAX_TOKENS).values(), ()))) > 5


# Each differs from every model of `CONFIGS`: latent attention, layers that share keys, norms over all heads, rotated
# pairs, experts, and a shared one.
FEW = ("deepseek-v3", "gemma3n", "olmo2", "glm4", "qwen3-moe", "qwen2-moe")


@pytest.mark.parametrize("name", mostly_full(ARCHITECTURES, *FEW))
def test_every_architecture_gives_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    """One schedule with prefill chunks, decodes, arrivals, and two ways of preemption."""
    model = save_model(tmp_path, ARCHITECTURES[name]())
    engine = build_torch_engine(
        EngineConfig(str(tmp_path), dtype="float32", device="cpu", block_size=4, max_num_seqs=16)
    )
    prompts = make_prompts(random.Random(3), count=4)
    rng = random.Random(5)
    preempt = random_preemption(rng, 0.2, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
    news = [make_new(k, p, max_tokens=MAX_TOKENS, ignore_eos=True) for k, p in prompts.items()]
    driven = drive(engine, news, random_chunks(rng, 9), preempt, arrivals_a_step=2)
    expected = {k: generate(model, p, MAX_TOKENS) for k, p in prompts.items()}
    assert {k: tuple(d.output) for k, d in driven.items()} == expected
    assert len(set(sum(expected.values(), ()))) > 5, "a model that repeats one token would pass with any attention"


@pytest.mark.parametrize("name", mostly_full(["llama", *ARCHITECTURES], "llama"))
def test_every_architecture_mostly_agrees_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Rounding may decide a near tie otherwise, and change every token after it: the first tokens are compared."""
    model = save_model(tmp_path, {**CONFIGS, **ARCHITECTURES}[name]())
    engine = build_torch_engine(
        EngineConfig(str(tmp_path), dtype="bfloat16", device="cpu", block_size=4, max_num_seqs=16)
    )
    prompts = make_prompts(random.Random(4), count=12)
    driven = drive(engine, [make_new(k, p, max_tokens=2, ignore_eos=True) for k, p in prompts.items()])
    assert all(d.failure is None and len(d.output) == 2 for d in driven.values())
    with torch.inference_mode():
        first = {k: int(model(torch.tensor([p])).logits[0, -1].argmax()) for k, p in prompts.items()}
    assert sum(driven[k].output[0] == token_id for k, token_id in first.items()) >= 8


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_decode_groups_of_very_different_contexts(
    name: str, make_engine: MakeEngine, generated: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes split into several groups, in an order that is not the plan's."""
    monkeypatch.setattr("engine.native.batch.packing._PADDED_TOKENS_WORTH_A_GROUP", 16)
    prompts = make_prompts(random.Random(9), lengths=(3, 60, 7, 40, 100, 5))
    driven = drive(make_engine(name), [make_new(k, p) for k, p in prompts.items()])
    assert {k: tuple(d.output) for k, d in driven.items()} == generated(name, prompts, 8)
