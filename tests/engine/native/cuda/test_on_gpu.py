"""The engine on a GPU: kernels, fused layers and graphs are used, and the greedy tokens are those of `model.generate`.

Skipped where there is no GPU; `make gpu-check` runs it where there is one.
"""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.interface import PreemptionMode, Run, StepPlan
from engine.native.execution.torch_engine import TorchEngine
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.contract.reported import Reported
from tests.engine.drive import drive, make_new, random_chunks, random_preemption
from tests.engine.models import CONFIGS, generate, make_prompts, save_model, tiny

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]

KV_BYTES = 1 << 21
MAX_TOKENS = 16
PROMPTS = make_prompts(random.Random(3), 6)
MIN_AGREEMENT = 0.5  # share of bf16 tokens equal to fp32's; tiny random models have many near ties


def build(make_engine: MakeEngine, name: str, **changes: Any) -> tuple[TorchEngine, dict[str, dict[str, Any]]]:
    """Return the engine and its start's log entries by event."""
    with capture_logs() as logs:
        engine = make_engine(name, device="cuda", kv_cache_bytes=KV_BYTES, **changes)
    return engine, {entry["event"]: dict(entry) for entry in logs}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_kernels_fused_layers_and_graphs_are_used(name: str, make_engine: MakeEngine) -> None:
    engine, logs = build(make_engine, name)
    assert engine.info.attention_backend == "own Triton kernels"
    assert logs["model optimized"]["fused_layers"] == 2
    assert logs["CUDA graphs captured"]["decodes"] == [1, 2, 4, 8, 16]
    assert logs["CUDA graphs captured"]["with_prefill"] == 2
    assert not [entry for entry in logs.values() if entry["log_level"] == "warning"]


@pytest.mark.parametrize("exact", [False, True])
def test_fp8_kv_is_attended_by_the_kernels_in_any_schedule(exact: bool, make_engine: MakeEngine) -> None:
    """With kernels, fused layers and graphs; with `exact`, the bits are the same, too."""
    settings = {"dtype": "bfloat16", "exact": exact, "kv_cache_dtype": "fp8", "prefix_cache": False}
    engine, logs = build(make_engine, "qwen3", **settings)
    assert engine.info.attention_backend == "own Triton kernels"
    assert logs["engine ready"]["kv_cache_dtype"] == "fp8"
    assert logs["model optimized"]["fused_layers"] == 2
    assert logs["CUDA graphs captured"]["decodes"]
    news = [make_new(k, p, max_tokens=MAX_TOKENS, logprobs=0) for k, p in PROMPTS.items()]
    alone, reported = Reported(), Reported()
    for new in news:
        drive(engine, [new], after_step=alone)
    rng = random.Random(4)
    preempt = random_preemption(rng, 0.2, *map(PreemptionMode, engine.info.preemption_modes))
    driven = drive(engine, news, random_chunks(rng, 9), preempt, arrivals_a_step=2, after_step=reported)
    assert all(len(d.output) == MAX_TOKENS or d.finish_reason for d in driven.values())
    if exact:
        assert reported.output == alone.output
    else:  # the first tokens come of the same prompts
        first = [(reported.output[k][0].token_id, alone.output[k][0].token_id) for k in PROMPTS]
        assert sum(one == other for one, other in first) >= MIN_AGREEMENT * len(first)


@pytest.fixture
def expected(request: pytest.FixtureRequest, model_directory: ModelDirectory) -> dict[str, tuple[int, ...]]:
    """The tokens of `generate` in fp32 on the CPU."""
    model = model_directory(request.getfixturevalue("name"))[1]
    return {seq_id: tuple(generate(model, prompt, MAX_TOKENS)) for seq_id, prompt in PROMPTS.items()}


@pytest.mark.parametrize("is_disturbed", (False, True), ids=("whole", "chunked-and-preempted"))
@pytest.mark.parametrize("has_graphs", (False, True))
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_tokens_are_those_of_generate(
    name: str, has_graphs: bool, is_disturbed: bool, make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    rng = random.Random(5)
    engine = make_engine(name, device="cuda", kv_cache_bytes=KV_BYTES, cuda_graphs=has_graphs)
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


@pytest.mark.parametrize("has_graphs", (False, True))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("name", ("qwen3", "gpt2"))
def test_exact_log_probabilities_are_the_same_in_any_schedule(
    name: str, dtype: str, has_graphs: bool, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Alone with whole prompts, and together in chunks with every preemption. GPT-2 is computed by transformers."""
    if name == "gpt2":
        save_model(tmp_path, tiny("GPT2", hidden_size=64)())  # heads of 16 numbers

    def make(**changes: Any) -> TorchEngine:
        settings = {"device": "cuda", "dtype": dtype, "kv_cache_bytes": KV_BYTES, "cuda_graphs": has_graphs, **changes}
        if name == "gpt2":
            return build_torch_engine(
                EngineConfig(str(tmp_path), block_size=4, max_num_seqs=16, exact=True, **settings)
            )
        return make_engine(name, exact=True, **settings)

    news = [
        make_new(seq_id, prompt, max_tokens=MAX_TOKENS, temperature=i % 2, seed=i, logprobs=2)
        for i, (seq_id, prompt) in enumerate(PROMPTS.items())
    ]
    alone, engine = Reported(), make(prefix_cache=False)
    for new in news:
        drive(engine, [new], after_step=alone)
    for seed in range(3):
        rng, together = random.Random(seed), Reported()
        preempt = random_preemption(rng, 0.2, PreemptionMode.PAUSE, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)
        drive(make(), news, random_chunks(rng, 20), preempt, arrivals_a_step=2, after_step=together)
        assert together.output == alone.output


def test_exact_is_refused_for_experts(make_engine: MakeEngine) -> None:
    with pytest.raises(EngineStartError, match="--exact cannot be kept"):
        make_engine("gpt-oss", device="cuda", kv_cache_bytes=KV_BYTES, exact=True)


def test_a_burst_beyond_any_captured_batch_size(make_engine: MakeEngine, model_directory: ModelDirectory) -> None:
    """Sequences end one after another, so that steps of every size from 40 to 1 are run."""
    engine = make_engine("llama", device="cuda", kv_cache_bytes=KV_BYTES, max_num_seqs=40)
    prompts = {f"s{i}": (1 + i % 50, 2, 3) for i in range(40)}
    news = [make_new(seq_id, prompt, max_tokens=1 + i % 20) for i, (seq_id, prompt) in enumerate(prompts.items())]
    driven = drive(engine, news)
    model = model_directory("llama")[1]
    for i, (seq_id, prompt) in enumerate(prompts.items()):
        assert tuple(driven[seq_id].output) == tuple(generate(model, prompt, 1 + i % 20)), seq_id


def test_int8_weights_give_the_cpus_tokens(make_engine: MakeEngine) -> None:
    news = [make_new(seq_id, prompt, max_tokens=MAX_TOKENS) for seq_id, prompt in PROMPTS.items()]
    expected = {k: d.output for k, d in drive(make_engine("llama", optimize=False, quantize="int8"), news).items()}
    engine, logs = build(make_engine, "llama", quantize="int8")
    assert logs["model optimized"]["fused_layers"] == 2
    assert not [entry for entry in logs.values() if entry["log_level"] == "warning"]
    assert {k: d.output for k, d in drive(engine, news).items()} == expected


def test_graphs_can_be_switched_off(make_engine: MakeEngine) -> None:
    assert "CUDA graphs captured" not in build(make_engine, "llama", cuda_graphs=False)[1]


def test_a_greedy_decode_step_waits_for_the_device_once(make_engine: MakeEngine) -> None:
    """The host waits for the step's tokens only."""
    engine, _ = build(make_engine, "llama")
    names = [f"s{i}" for i in range(5)]
    news = tuple(make_new(name, [1, 2, 3 + i], max_tokens=20) for i, name in enumerate(names))
    engine.step(StepPlan(0, start=news, run=tuple(Run(name, 3) for name in names)))
    for step_id in range(1, 4):
        engine.step(StepPlan(step_id, run=tuple(Run(name, 1) for name in names)))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step(StepPlan(4, run=tuple(Run(name, 1) for name in names)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) <= 1


SAMPLING: dict[str, dict[str, Any]] = {
    "top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "top_k and min_p": {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "seed": 2},
    "plain": {"temperature": 1.0, "seed": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias and no early end": {"logit_bias": ((5, 3.0), (7, -100.0)), "min_tokens": 4, "stop_token_ids": (5,)},
    "log probabilities": {"logprobs": 3, "prompt_logprobs": 2},
}


def test_sampling_equals_the_cpus_with_and_without_preemption(make_engine: MakeEngine) -> None:
    news = [make_new(name, range(3, 12), max_tokens=12, **options) for name, options in SAMPLING.items()]
    expected = {name: s.output for name, s in drive(make_engine("llama", optimize=False), news).items()}
    engine, _ = build(make_engine, "llama")
    assert {name: s.output for name, s in drive(engine, news).items()} == expected
    rng = random.Random(4)
    preempt = random_preemption(rng, 0.2, PreemptionMode.PAUSE, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)
    disturbed = drive(engine, news, random_chunks(rng, 7), preempt, arrivals_a_step=2)
    assert {name: s.output for name, s in disturbed.items()} == expected
