"""On a GPU, kernels, fused layers and graphs are used and do not change the tokens. Skipped without a GPU."""

import random
import warnings
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from engine.interface import PreemptionMode, Run, StepPlan
from engine.native.execution.torch_engine import TorchEngine
from tests.engine.conftest import MakeEngine
from tests.engine.drive import drive, make_new, random_chunks, random_preemption

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]

KV_BYTES = 1 << 21


def build(make_engine: MakeEngine, name: str, **changes: Any) -> tuple[TorchEngine, dict[str, dict[str, Any]]]:
    """Return the engine and its start's log entries by event."""
    with capture_logs() as logs:
        engine = make_engine(name, device="cuda", kv_cache_bytes=KV_BYTES, **changes)
    return engine, {entry["event"]: dict(entry) for entry in logs}


def outputs(engine: TorchEngine) -> dict[str, list[int]]:
    news = [make_new(f"s{i}", range(1 + i, 9 + 2 * i), max_tokens=4 + 3 * i) for i in range(12)]
    return {seq_id: driven.output for seq_id, driven in drive(engine, news, arrivals_a_step=3).items()}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_kernels_fused_layers_and_graphs_are_used(name: str, make_engine: MakeEngine) -> None:
    engine, logs = build(make_engine, name)
    assert engine.info.attention_backend == "own Triton kernels"
    assert logs["model optimized"]["fused_layers"] == 2
    assert logs["CUDA graphs captured"]["batch_sizes"] == [1, 2, 4, 8, 16]
    assert not [entry for entry in logs.values() if entry["log_level"] == "warning"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt-oss"])
def test_they_do_not_change_the_tokens(name: str, make_engine: MakeEngine) -> None:
    plain = outputs(build(make_engine, name, optimize=False)[0])
    assert outputs(build(make_engine, name, cuda_graphs=False)[0]) == plain
    assert outputs(build(make_engine, name)[0]) == plain


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
