"""GGUF files of models with experts: their matrices stay the blocks of the file, or the file is refused by name."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.gguf import WEIGHTS, unpacked
from engine.native.cpu.native_layer import NativeDecoderLayer
from engine.native.model.quantized import QuantizedLinear, QuantizedStack
from tests.engine.drive import drive, make_new
from tests.engine.gguf_files import write_experts
from tests.engine.models import generate, make_prompts, save_model, tiny
from tests.engine.native.cpu.compiled import library_with_products
from tests.engine.test_gguf import load_blocks

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "block_size": 4, "kv_cache_bytes": 1 << 20}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_file(directory: Path, name: str, kinds: dict[str, str], **changes: Any) -> tuple[Path, Any]:
    """Return a file, and transformers' model with the weights that it holds."""
    options = {"norm_topk_prob": True} if name == "Qwen3Moe" else {}
    model = save_model(directory / "plain", tiny(name, **{**SIZES, **options, **changes})())
    file = directory / "small.gguf"
    architecture = {"Qwen3Moe": "qwen3moe", "Qwen2Moe": "qwen2moe"}[name]
    model.load_state_dict(write_experts(file, model, architecture, kinds))
    return file, model


def check_numbers(kept: Any, model: Any, error: float) -> None:
    """Check that all weights of `kept` are those of `model`, up to an error of a scale's rounding."""
    modules = dict(kept.named_modules())
    for name, expected in model.state_dict().items():
        module = modules.get(name.removesuffix(".weight"))
        if isinstance(module, QuantizedStack):
            found = torch.stack([module[index] for index in range(len(module))])
        elif isinstance(module, QuantizedLinear):
            found = module.unpacked(torch.float32)
        else:
            found = kept.state_dict()[name]
        torch.testing.assert_close(found, expected, rtol=error, atol=error * float(expected.abs().max()))


def check_first_tokens(engine: Any, model: Any) -> None:
    """Check that most of the engine's first tokens are those of `model`: rows are rounded to bytes."""
    prompts = make_prompts(random.Random(3), count=8)
    driven = drive(engine, [make_new(k, p, max_tokens=1, ignore_eos=True) for k, p in prompts.items()])
    assert sum(tuple(driven[k].output) == generate(model, p, 1) for k, p in prompts.items()) >= 6


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen2Moe"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_experts_stay_as_they_are(name: str, kind: str, tmp_path: Path) -> None:
    file, model = make_file(tmp_path, name, {"": kind})
    kept = load_blocks(file, model.config)
    assert sum(isinstance(module, QuantizedStack) for module in kept.modules()) == 2 * 2
    check_numbers(kept, model, 1e-6)
    prompts = make_prompts(random.Random(3), count=3)
    assert all(generate(kept, p, 8) == generate(model, p, 8) for p in prompts.values())


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kinds",
    [
        {"ffn_down_exps": "Q6_K", "exps": "Q4_K", "": "Q8_0"},
        {"ffn_gate_exps": "Q5_K", "ffn_up_exps": "Q6_K", "": "Q8_0"},
    ],
    ids=["Q4_K_M", "gates and ups of two kinds"],
)
def test_matrices_of_a_layer_may_be_of_several_kinds(kinds: dict[str, str], tmp_path: Path) -> None:
    library_with_products()
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    file, model = make_file(tmp_path, "Qwen3Moe", kinds, **sizes)
    check_numbers(load_blocks(file, model.config), model, 6e-4)
    engine = build_torch_engine(EngineConfig(str(unpacked(file, with_weights=False)), dtype="bfloat16", **OPTIONS))
    layers = [module for module in engine._runner._model.modules() if isinstance(module, NativeDecoderLayer)]
    assert [layer.has_experts for layer in layers] == [True]
    check_first_tokens(engine, model)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen2Moe"])
def test_the_engine_keeps_experts_where_it_multiplies_them(name: str, tmp_path: Path) -> None:
    """In float32, the file is unpacked: to bfloat16, although routers are F32."""
    library_with_products()
    file, model = make_file(tmp_path, name, {"": "Q8_0"})
    directory = unpacked(file, with_weights=False)
    with capture_logs() as logs:
        engine = build_torch_engine(EngineConfig(str(directory), dtype="bfloat16", **OPTIONS))
    (kept,) = [entry for entry in logs if entry["event"] == "weights stay as the blocks of the GGUF file"]
    assert kept["matrices_of_experts"] == 2 * 2
    assert [entry["fused_experts"] for entry in logs if entry["event"] == "model optimized"] == [2]
    assert not (directory / WEIGHTS).exists()
    check_first_tokens(engine, model)
    check_first_tokens(build_torch_engine(EngineConfig(str(directory), dtype="float32", **OPTIONS)), model)
    assert (directory / WEIGHTS).stat().st_size < 2.2 * sum(p.numel() for p in model.parameters())


@pytest.mark.timeout(400)
def test_matrices_of_other_kinds_are_unpacked(tmp_path: Path) -> None:
    file, model = make_file(tmp_path, "Qwen3Moe", {"ffn_up_exps": "BF16", "": "Q8_0"})
    kept = load_blocks(file, model.config)
    stacks = [name for name, module in kept.named_modules() if isinstance(module, QuantizedStack)]
    assert stacks == [f"model.layers.{i}.mlp.experts.down_proj" for i in range(2)]
    check_numbers(kept, model, 1e-6)


@pytest.mark.parametrize("architecture", ["llama", "olmoe", "gpt-oss"])
def test_experts_that_transformers_does_not_read_are_refused(architecture: str, tmp_path: Path) -> None:
    """Mixtral is a Llama with experts."""
    model = save_model(tmp_path / "plain", tiny("Qwen3Moe", **SIZES)())
    file = tmp_path / "small.gguf"
    write_experts(file, model, architecture, {"": "Q8_0"}, names_of="qwen3moe")
    reason = "transformers reads no experts such as blk.0.ffn_.*_exps.weight from files of the architecture "
    with pytest.raises(EngineStartError, match=reason + architecture):
        unpacked(file, with_weights=False)
