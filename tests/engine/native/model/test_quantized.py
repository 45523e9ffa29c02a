"""Quantised weights: what is rounded, which layers are, and that engines with them start or say why not."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import EngineConfig, EngineStartError, Quantization
from engine.factory import build_torch_engine
from engine.native.model.grouped_weight import rounded
from engine.native.model.loader import load_config, load_model, weight_bytes
from engine.native.model.quantization import quantize
from engine.native.model.quantized import QuantizedLinear, QuantizedStack
from tests.engine.drive import drive, make_new
from tests.engine.models import ARCHITECTURES, CONFIGS, generate, make_prompts, save_model, tiny
from tests.marks import mostly_full

IN_FOUR_BITS = ("llama", "gemma3", "qwen3")


def make_layer(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(out_features)
        return nn.Linear(in_features, out_features, bias=bias)


@torch.inference_mode()
def test_joined_layers_compute_what_they_compute_alone() -> None:
    sizes = ((4, False, 8), (6, True, 8), (3, False, 4), (5, True, 4), (2, False, 8))
    layers = [QuantizedLinear.of(make_layer(16, size, bias), bits) for size, bias, bits in sizes]
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    together = torch.cat([layer(x) for layer in layers], dim=-1)
    layer = QuantizedLinear.joined(layers)
    assert [part.out_features for part in layer.parts] == [10, 8, 2]
    torch.testing.assert_close(layer(x), together)


def load_quantized(directory: Path, kind: Quantization) -> Any:
    config = EngineConfig(str(directory))
    model = load_model(config, load_config(config), torch.float32, torch.device("cpu"))
    quantize(model, kind)
    return model


def held_bytes(model: Any) -> int:
    """Return the bytes of all weights."""
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta")
    return held - sum(t.nbytes for t in model.model.rotary_emb.buffers())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_all_linear_layers_are_quantised(kind: Quantization, tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["llama"]())
    model = load_quantized(tmp_path, kind)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {type(linear) for linear in linears.values()} == {QuantizedLinear}
    assert len(linears) == 2 * 7 + 1
    expected = weight_bytes(EngineConfig(str(tmp_path), quantize=kind), model.config, torch.float32)
    assert expected is not None
    assert expected * 0.95 <= held_bytes(model) <= expected
    bits = {name: linear.parts[0].bits for name, linear in linears.items()}
    if kind == "int8":
        assert set(bits.values()) == {8}


def test_layers_that_lose_most_by_4_bits_have_8(tmp_path: Path) -> None:
    """Layers lose little whose groups have only 16 different numbers."""
    model = save_model(tmp_path, CONFIGS["llama"]())
    for name, module in model.named_modules():
        if name.endswith(("up_proj", "down_proj", "o_proj", "gate_proj")):
            module.weight.data = rounded(module.weight, 4).unpacked(torch.float32)
    model.save_pretrained(tmp_path)
    model = load_quantized(tmp_path, "int4")
    bits = {name: m.parts[0].bits for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    fine = [name.rsplit(".", 1)[-1] for name in bits if bits[name] == 8]
    assert fine.count("q_proj") == fine.count("k_proj") == fine.count("v_proj") == 2
    assert len(fine) == 2 * 3 + 2  # and the output layer, and one more, for which there is room


@pytest.mark.parametrize("name", mostly_full([*CONFIGS, *ARCHITECTURES], *CONFIGS))
def test_greedy_tokens_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    """Of every architecture: the tokens are those of transformers' modules with the rounded weights."""
    expected_of = save_model(tmp_path, {**CONFIGS, **ARCHITECTURES}[name]())
    kind: Quantization = "int4" if name in IN_FOUR_BITS else "int8"
    quantized = load_quantized(tmp_path, kind)
    for path, module in quantized.named_modules():
        if isinstance(module, QuantizedLinear):
            linear = expected_of.get_submodule(path)
            linear.weight = nn.Parameter(module.unpacked(torch.float32), requires_grad=False)
        elif isinstance(module, QuantizedStack):
            matrices = torch.stack([module[index] for index in range(len(module))])
            expected_of.get_parameter(path).data = matrices
    options: dict[str, Any] = {"device": "cpu", "block_size": 4, "max_num_seqs": 16}
    engine = build_torch_engine(EngineConfig(str(tmp_path), dtype="float32", quantize=kind, **options))
    prompts = make_prompts(random.Random(3), count=3)
    driven = drive(engine, [make_new(k, p, max_tokens=8, ignore_eos=True) for k, p in prompts.items()])
    expected = {k: generate(expected_of, p, 8) for k, p in prompts.items()}
    assert {k: tuple(d.output) for k, d in driven.items()} == expected


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "vocab_size": 32,
}


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss"])
def test_experts_are_quantised_and_counted(name: str, kind: Quantization, tmp_path: Path) -> None:
    plain = save_model(tmp_path, tiny(name, **EXPERTS)())
    model = load_quantized(tmp_path, kind)
    stacks = {path: m for path, m in model.named_modules() if isinstance(m, QuantizedStack)}
    assert len(stacks) == 2 * 2
    largest = {"int8": 0.01, "int4": 0.12}[kind]
    for path, stack in stacks.items():
        expected = plain.get_parameter(path)
        found = torch.stack([stack[index] for index in range(4)])
        assert 0 < (found - expected).norm() / expected.norm() < largest, path
        matrices = expected.transpose(1, 2) if name == "GptOss" else expected
        (part,) = stack.expert(1)
        alike = torch.equal(part.unpacked(torch.float32), rounded(matrices[1], part.bits).unpacked(torch.float32))
        assert alike is (part.bits == 8 or path.endswith("down_proj")), "large inputs of gates and ups count more"
    expected = weight_bytes(EngineConfig(str(tmp_path), quantize=kind), model.config, torch.float32)
    assert expected is not None
    assert expected * 0.95 <= held_bytes(model) <= expected * 1.002  # routers keep their dtype


def test_experts_may_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, experts keep their dtype, and count as such."""
    save_model(tmp_path, tiny("Qwen3Moe", **EXPERTS)())
    config = EngineConfig(str(tmp_path), quantize="int8")
    model = load_model(config, load_config(config), torch.float32, torch.device("cpu"))
    assert quantize(model, "int8", with_experts=False) == (2 * 4 + 1, 0)
    assert not any(isinstance(module, QuantizedStack) for module in model.modules())
    monkeypatch.setattr("engine.native.model.loader.choose_device", lambda name: torch.device("cuda"))
    expected = weight_bytes(config, model.config, torch.float32)
    assert expected is not None
    assert expected * 0.95 <= held_bytes(model) <= expected
    monkeypatch.setattr("engine.native.model.loader.choose_device", torch.device)
    assert weight_bytes(replace(config, device="cpu"), model.config, torch.float32, is_loading=True) == expected


def test_experts_that_are_computed_all_at_once_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        every = torch.einsum("th,eih->tei", x, experts.gate_up_proj)
        every = torch.einsum("tei,ehi->teh", experts._apply_gate(every), experts.down_proj)
        return (every.gather(1, ids[..., None].expand(-1, -1, x.shape[1])) * shares[..., None]).sum(1)

    save_model(tmp_path, tiny("Qwen3Moe", **EXPERTS)())
    monkeypatch.setattr("transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts.forward", compute)
    model = load_quantized(tmp_path, "int8")
    assert not any(isinstance(module, QuantizedStack) for module in model.modules())
    assert all(isinstance(layer.mlp.experts.down_proj, nn.Parameter) for layer in model.model.layers)


def test_a_router_is_not_quantised(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["phimoe"]())
    model = load_quantized(tmp_path, "int4")
    routers = {name for name, module in model.named_modules() if name.endswith((".gate", ".router"))}
    assert routers
    assert not any(isinstance(model.get_submodule(name), QuantizedLinear) for name in routers)


def test_weights_that_are_quantised_already_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, CONFIGS["llama"]())
    monkeypatch.setattr("engine.native.startup.loading.is_quantised", lambda model: True)
    monkeypatch.setattr("engine.native.startup.loading.quantization_method", lambda hf_config: "awq")
    with pytest.raises(EngineStartError, match="are quantised already, with awq: drop --quantize"):
        build_torch_engine(EngineConfig(str(tmp_path), dtype="float32", quantize="int8"))
