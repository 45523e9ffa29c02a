"""The law of `--exact` on CPUs, and which models and devices it is refused for.

A sequence's log probabilities are the same by bits alone and in any schedule: chunks, preemption by recomputation,
prefixes of others, drafts. `tests/engine/native/cuda/test_exact.py` has the law of the kernels for CUDA.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.interface import PreemptionMode
from engine.native.execution.torch_engine import TorchEngine
from engine.native.startup.exactness import checked_logits
from tests.engine.conftest import MakeEngine
from tests.engine.contract.reported import Reported
from tests.engine.drive import drive, make_new, random_chunks, random_drafts, random_preemption
from tests.engine.models import save_model
from tests.engine.native.cpu.compiled import PRODUCTS, library_with
from tests.engine.native.cpu.test_native_layer import CONFIGS
from tests.engine.native.execution.test_oom_split import ScarceMemory
from tests.marks import mostly_full

PROMPTS = [[(7 * i + j * j) % 90 for i in range(n)] for j, n in enumerate((1, 3, 20, 45, 120, 120))]
PROMPTS.append(PROMPTS[-1][:60] + [5] * 50)  # finds a part of another's blocks
NEWS = [
    make_new(f"s{i}", prompt, max_tokens=20, temperature=i % 2, seed=i, logprobs=2, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS)
]


def make(directory: Path, exact: bool, **changes: Any) -> TorchEngine:
    settings = {"dtype": "bfloat16", "device": "cpu", "kv_cache_bytes": 1 << 22, "block_size": 8, **changes}
    return build_torch_engine(EngineConfig(str(directory), exact=exact, **settings))


def alone(engine: TorchEngine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sequences and their log probabilities, each run alone, with its whole prompt in one step."""
    reported, driven = Reported(), {}
    for new in NEWS:
        driven |= drive(engine, [new], after_step=reported)
    return driven, dict(reported.output)


def together(engine: TorchEngine, seed: int, driven: dict[str, Any]) -> dict[str, Any]:
    """Return log probabilities of the same sequences in a random schedule."""
    rng, reported = random.Random(seed), Reported()
    preempt = random_preemption(rng, 0.15, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
    chunks, drafts = random_chunks(rng, rng.choice((5, 40, 100))), random_drafts(rng, driven, 4)
    drive(engine, NEWS, chunks, preempt, rng.choice((1, 2, None)), reported, drafts)
    return dict(reported.output)


QUANTIZED = [(name, kind) for name in ("llama", "qwen3", "gemma3", "mixtral") for kind in ("int8", "int4")]


@pytest.mark.parametrize(
    ("name", "quantize"),
    mostly_full([*((name, None) for name in CONFIGS), *QUANTIZED], ("qwen3", None), ("gpt-oss", None)),
)
@pytest.mark.parametrize("kind", PRODUCTS)
def test_tokens_are_the_same_by_bits_in_any_schedule(
    name: str, kind: str, quantize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_with(kind, monkeypatch)
    save_model(tmp_path, CONFIGS[name]())
    driven, expected = alone(make(tmp_path, exact=True, quantize=quantize, prefix_cache=False))
    for seed in range(3):
        assert together(make(tmp_path, exact=True, quantize=quantize), seed, driven) == expected
    # Guards this test: without the mode, recomputed tokens round otherwise; with floats, hardly ever to other numbers.
    if quantize is None and kind != "floats":
        driven, expected = alone(make(tmp_path, exact=False, prefix_cache=False))
        assert together(make(tmp_path, exact=False), 0, driven) != expected


def test_pieces_of_a_step_that_does_not_fit_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_with("dots", monkeypatch)
    save_model(tmp_path, CONFIGS["qwen3"]())
    engine = make(tmp_path, exact=True, prefix_cache=False)
    driven, expected = alone(engine)
    scarce = ScarceMemory(monkeypatch)
    scarce.most_rows = 30
    assert together(engine, 1, driven) == expected
    assert scarce.num_refused


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen3", {}, r"computes with (addmm|mm) here, .*; on a CPU use --dtype bfloat16, or drop --exact"),
        ("llama", {}, "computes with torch's attention here"),
        ("qwen3", {"optimize": False}, "computes with torch's attention here"),
        ("qwen3", {"kv_cache_bytes": 1 << 12}, "the KV cache is too small"),
    ],
)
def test_it_is_refused_where_it_cannot_be_kept(
    name: str, changes: dict[str, Any], reason: str, make_engine: MakeEngine
) -> None:
    with pytest.raises(EngineStartError, match=reason):
        make_engine(name, exact=True, **changes)


def test_on_cuda_experts_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    """By the operators of the model, which are those of a CPU in float32."""
    cuda, engine = torch.device("cuda"), make_engine("qwen3")
    assert checked_logits(engine._runner, engine.info, cuda).isfinite().all()
    save_model(tmp_path, CONFIGS["mixtral"]())
    engine = make(tmp_path, exact=False, dtype="float32")
    with pytest.raises(EngineStartError, match=r"--exact cannot be kept: .* computes with _grouped_mm, .*; drop it"):
        checked_logits(engine._runner, engine.info, cuda)
