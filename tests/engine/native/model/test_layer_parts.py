"""What the parts of a layer say of it: norms, rotation, sinks, and the MLP or the experts, by their definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.native.model.layer_kernels import Activation
from engine.native.model.layer_parts import LayerParts, Rotation, parts_of
from engine.native.model.mlp_parts import Experts, Mlp
from tests.engine.models import ARCHITECTURES, CONFIGS, tiny


def layer_of(config: Any, layer: int = 0) -> Any:
    """Return a layer with random numbers everywhere, also where a new model has ones or zeros."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        found = AutoModelForCausalLM.from_config(config).model.layers[layer]
        for parameter in found.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return found


def parts(name: str, layer: int = 0) -> LayerParts:
    found = parts_of(layer_of({**CONFIGS, **ARCHITECTURES}[name](), layer))
    assert found is not None
    return found


def sizes(parts: LayerParts) -> list[int | None]:
    """Return how many numbers each norm takes together."""
    form = parts.form
    norms = (form.input_norm, form.attended_norm, form.mlp_norm, form.computed_norm, form.query_norm, form.key_norm)
    return [None if norm is None else len(norm.weight) for norm in norms]


def test_norms_may_be_left_out_or_take_all_heads_together() -> None:
    assert sizes(parts("llama")) == [32, None, 32, None, None, None]
    assert sizes(parts("qwen3")) == [32, None, 32, None, 16, 16]
    assert sizes(parts("gemma2")) == sizes(parts("glm4")) == [32, 32, 32, 32, None, None]
    assert sizes(parts("olmo2")) == [None, 32, None, 32, 32, 16]
    assert sizes(parts("olmoe")) == [32, None, 32, None, 32, 16]


def test_rotations() -> None:
    assert parts("llama").form.rotation == parts("phi3").form.rotation == Rotation()
    assert parts("glm4").form.rotation == parts("helium").form.rotation == Rotation(in_pairs=True)
    assert parts("gpt-oss").form.rotation == Rotation(angles_once=True)
    assert parts("smollm3", layer=1).form.rotation is None


def test_sinks() -> None:
    layer = layer_of(CONFIGS["gpt-oss"]())
    found = parts_of(layer)
    assert found is not None
    assert found.form.sinks is not None
    assert torch.equal(found.form.sinks, layer.self_attn.sinks)
    assert parts("llama").form.sinks is None
    layer.self_attn.others = nn.Parameter(torch.zeros(4))
    assert parts_of(layer) is None


def test_attention_that_scales_queries_by_positions_is_left_to_its_model() -> None:
    assert parts_of(layer_of(ARCHITECTURES["ministral3"]())) is None


def expected_of(experts: Experts, x: Tensor) -> Tensor:
    """Return the sum of a row's experts by definition, for `x` (rows, hidden)."""
    routed = experts.count - experts.always
    logits = experts.router_linear()(x)
    best = logits[:, :routed].topk(experts.chosen).indices
    total = logits.gather(1, best) if experts.normalises else logits[:, :routed]
    shares = torch.zeros(len(x), experts.count)
    shares.scatter_(1, best, (logits.gather(1, best) - total.logsumexp(1, keepdim=True)).exp())
    if experts.always:
        shares[:, routed:] = logits[:, routed:].sigmoid()
    found = []
    for gate_up, down in zip(experts.gate_ups(), experts.downs(), strict=True):
        gate, up = gate_up(x).chunk(2, dim=1)
        found.append(down(experts.activation(gate, up)))
    return (shares[..., None] * torch.stack(found, dim=1)).sum(1)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (ARCHITECTURES["mixtral"](), (4, 2, 0, True, Activation.SILU, False)),
        (ARCHITECTURES["qwen3-moe"](), (4, 2, 0, False, Activation.SILU, False)),
        (tiny("Qwen3Moe", num_experts=6, num_experts_per_tok=1, norm_topk_prob=True)(), (6, 1, 0, True, 0, False)),
        (ARCHITECTURES["olmoe"](), (4, 2, 0, False, Activation.SILU, False)),
        (ARCHITECTURES["qwen2-moe"](), (5, 2, 1, False, Activation.SILU, False)),
        (
            tiny("Qwen2Moe", num_experts=5, moe_intermediate_size=8, shared_expert_intermediate_size=24)(),
            (8, 4, 3, False, Activation.SILU, False),
        ),
        (CONFIGS["gpt-oss"](), (4, 2, 0, True, Activation.CLAMPED, True)),
    ],
    ids=lambda value: type(value).__name__,
)
@torch.inference_mode()
def test_experts_compute_what_the_block_computes(config: Any, form: tuple[Any, ...]) -> None:
    layer = layer_of(config)
    found = parts_of(layer)
    assert found is not None
    experts, block = found.mlp, layer.mlp
    assert isinstance(experts, Experts)
    assert (experts.count, experts.chosen, experts.always, experts.normalises) == form[:4]
    assert (experts.activation, experts.is_interleaved) == form[4:]
    x = 3 * torch.randn(30, 32, generator=torch.Generator().manual_seed(1))
    computed = block(x[None])
    computed = computed if isinstance(computed, Tensor) else computed[0]
    torch.testing.assert_close(expected_of(experts, x), computed[0], atol=1e-4, rtol=1e-4)


def test_other_experts_are_left_to_their_block() -> None:
    odd = tiny("Qwen2Moe", num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=24)()
    assert parts_of(layer_of(odd)).mlp is None  # type: ignore[union-attr]
    assert parts("ernie4.5-moe", layer=1).mlp is None  # its router adds a bias of its own
    assert isinstance(parts("ernie4.5-moe").mlp, Mlp)


def change_router(layer: Any, change: Any) -> None:
    layer.mlp.gate.register_forward_hook(lambda module, inputs, output: change(*output))


@pytest.mark.parametrize(
    "change",
    [
        lambda logits, shares, ids: (logits, 2 * shares, ids),
        lambda logits, shares, ids: (logits, shares, (-logits).topk(2).indices),
        lambda logits, shares, ids: (logits, shares),
    ],
)
def test_a_router_that_does_something_else_is_not_recognised(change: Any) -> None:
    layer = layer_of(ARCHITECTURES["mixtral"]())
    change_router(layer, change)
    assert parts_of(layer).mlp is None  # type: ignore[union-attr]


def test_an_activation_of_experts_that_is_another_one_is_not_recognised() -> None:
    layer = layer_of(CONFIGS["gpt-oss"]())
    layer.mlp.experts.limit = 6.0
    assert parts_of(layer).mlp is None  # type: ignore[union-attr]
