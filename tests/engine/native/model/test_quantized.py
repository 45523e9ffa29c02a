"""Weights in int8: what is rounded, which layers are, and that engines with them start or say why not."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine
from engine.native.model.loader import load_config, load_model, weight_bytes
from engine.native.model.quantized import QuantizedLinear, quantize
from tests.engine.drive import drive, make_new
from tests.engine.models import ARCHITECTURES, CONFIGS, generate, make_prompts, save_model
from tests.marks import mostly_full


def make_layer(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(out_features)
        return nn.Linear(in_features, out_features, bias=bias)


@torch.inference_mode()
def test_a_weight_is_rounded_by_at_most_half_a_step() -> None:
    layer = make_layer(40, 9, bias=True)
    layer.weight[3] *= 1000
    layer.weight[4] = 0.0
    quantized = QuantizedLinear.of(layer)
    rounded = quantized.codes * quantized.scales[:, None]
    steps = layer.weight.abs().amax(dim=1) / 127
    assert ((rounded - layer.weight).abs() <= 0.501 * steps[:, None]).all()
    assert (quantized.codes[4] == 0).all()
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(quantized(x), nn.functional.linear(x, rounded, layer.bias), atol=1e-3, rtol=1e-5)


@torch.inference_mode()
def test_joined_layers_compute_what_they_compute_alone() -> None:
    layers = [QuantizedLinear.of(make_layer(16, size, bias)) for size, bias in ((4, False), (6, True), (3, False))]
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    together = torch.cat([layer(x) for layer in layers], dim=-1)
    torch.testing.assert_close(QuantizedLinear.joined(layers)(x), together)


def load_quantized(directory: Path) -> Any:
    config = EngineConfig(str(directory))
    model = load_model(config, load_config(config), torch.float32, torch.device("cpu"))
    quantize(model)
    return model


def test_all_linear_layers_are_quantised(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["llama"]())
    model = load_quantized(tmp_path)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    assert kinds == [QuantizedLinear] * (2 * 7 + 1)
    config = EngineConfig(str(tmp_path), quantize="int8")
    embedding = model.get_input_embeddings().weight.numel()
    linears = sum(m.codes.numel() for m in model.modules() if isinstance(m, QuantizedLinear))
    norms = sum(p.numel() for p in model.parameters()) - embedding
    assert weight_bytes(config, model.config, torch.float32) == 4 * (embedding + norms) + linears


@pytest.mark.parametrize("name", mostly_full([*CONFIGS, *ARCHITECTURES], *CONFIGS))
def test_greedy_tokens_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    """Of every architecture: the tokens are those of transformers' modules with the rounded weights."""
    expected_of = save_model(tmp_path, {**CONFIGS, **ARCHITECTURES}[name]())
    quantized = load_quantized(tmp_path)
    for path, module in quantized.named_modules():
        if isinstance(module, QuantizedLinear):
            linear = expected_of.get_submodule(path)
            linear.weight = nn.Parameter(module.codes * module.scales[:, None], requires_grad=False)
    options: dict[str, Any] = {"device": "cpu", "block_size": 4, "max_num_seqs": 16}
    engine = build_torch_engine(EngineConfig(str(tmp_path), dtype="float32", quantize="int8", **options))
    prompts = make_prompts(random.Random(3), count=3)
    driven = drive(engine, [make_new(k, p, max_tokens=8, ignore_eos=True) for k, p in prompts.items()])
    expected = {k: generate(expected_of, p, 8) for k, p in prompts.items()}
    assert {k: tuple(d.output) for k, d in driven.items()} == expected


def test_a_router_is_not_quantised(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIGS["phimoe"]())
    model = load_quantized(tmp_path)
    routers = {name for name, module in model.named_modules() if name.endswith((".gate", ".router"))}
    assert routers
    assert not any(isinstance(model.get_submodule(name), QuantizedLinear) for name in routers)


def test_weights_that_are_quantised_already_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, CONFIGS["llama"]())
    monkeypatch.setattr("engine.native.startup.loading.is_quantised", lambda model: True)
    monkeypatch.setattr("engine.native.startup.loading.quantization_method", lambda hf_config: "awq")
    with pytest.raises(EngineStartError, match="are quantised already, with awq: drop --quantize"):
        build_torch_engine(EngineConfig(str(tmp_path), dtype="float32", quantize="int8"))
