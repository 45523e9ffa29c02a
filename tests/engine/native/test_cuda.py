"""The engine's specification on a GPU: the same greedy tokens as `model.generate`, through every preemption.

Skipped where there is no GPU; `make gpu-check` runs it where there is one.
"""

import random

import pytest
import torch

from engine.interface import PreemptionMode
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.drive import drive, make_new, random_chunks, random_preemption
from tests.engine.models import CONFIGS, generate, make_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")

MAX_TOKENS = 16
PROMPTS = make_prompts(random.Random(3), 6)
KV_BYTES = 1 << 21
MIN_AGREEMENT = 0.5  # share of bf16 tokens equal to fp32's; tiny random models have many near ties


@pytest.fixture
def expected(request: pytest.FixtureRequest, model_directory: ModelDirectory) -> dict[str, tuple[int, ...]]:
    """The tokens of `generate` in fp32 on the CPU."""
    model = model_directory(request.getfixturevalue("name"))[1]
    return {seq_id: tuple(generate(model, prompt, MAX_TOKENS)) for seq_id, prompt in PROMPTS.items()}


@pytest.mark.parametrize("is_disturbed", (False, True), ids=("whole", "chunked-and-preempted"))
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_tokens_are_those_of_generate(
    name: str, is_disturbed: bool, make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    rng = random.Random(5)
    engine = make_engine(name, device="cuda", kv_cache_bytes=KV_BYTES)
    modes = [mode for mode in PreemptionMode if mode.value in engine.info.preemption_modes]
    disturbance = {"chunk": random_chunks(rng, 7), "preempt": random_preemption(rng, 0.2, *modes), "arrivals_a_step": 2}
    news = [make_new(seq_id, prompt, max_tokens=MAX_TOKENS) for seq_id, prompt in PROMPTS.items()]
    free_blocks: list[int] = []
    schedule = disturbance if is_disturbed else {}
    driven = drive(engine, news, after_step=lambda result: free_blocks.append(result.free_blocks), **schedule)
    assert {seq_id: tuple(d.output) for seq_id, d in driven.items()} == expected
    assert free_blocks[-1] == engine.info.num_blocks


@pytest.mark.parametrize("name", ("llama", "qwen3"))
def test_bfloat16_mostly_agrees(name: str, make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]) -> None:
    engine = make_engine(name, device="cuda", dtype="bfloat16", kv_cache_bytes=KV_BYTES)
    news = [make_new(seq_id, prompt, max_tokens=MAX_TOKENS) for seq_id, prompt in PROMPTS.items()]
    driven = drive(engine, news)
    pairs = [(a, b) for seq_id, d in driven.items() for a, b in zip(d.output, expected[seq_id], strict=True)]
    agreement = sum(a == b for a, b in pairs) / len(pairs)
    print(f"{name}: bf16 agrees with fp32 in {agreement:.0%} of {len(pairs)} tokens")
    assert agreement >= MIN_AGREEMENT


def test_a_burst_beyond_any_captured_batch_size(make_engine: MakeEngine, model_directory: ModelDirectory) -> None:
    """Sequences end one after another, so that steps of every size from 40 to 1 are run."""
    engine = make_engine("llama", device="cuda", kv_cache_bytes=KV_BYTES, max_num_seqs=40)
    prompts = {f"s{i}": (1 + i % 50, 2, 3) for i in range(40)}
    news = [make_new(seq_id, prompt, max_tokens=1 + i % 20) for i, (seq_id, prompt) in enumerate(prompts.items())]
    driven = drive(engine, news)
    model = model_directory("llama")[1]
    for i, (seq_id, prompt) in enumerate(prompts.items()):
        assert tuple(driven[seq_id].output) == tuple(generate(model, prompt, 1 + i % 20)), seq_id
