"""What a decoder layer computes, as data: its projections, norms, activation, rotation and residuals.

Knows which modules the layers of transformers' models have; does not know how a layer is computed. What a module
computes is found by trying it on a few numbers: a norm may add 1 to its weight, and a class name tells neither.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.native.attention.kernels import HeadShape
from engine.native.model.layer_kernels import Activation, Norm
from engine.native.model.quantized import QuantizedLinear

# The norms of a layer by their names: before attention, after it, before the MLP and after it. Llama and most others;
# Gemma 2 and 3.
_NORMS: Sequence[tuple[str, str | None, str, str | None]] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))  # the second as in Phi-3
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_HEAD_NORMS = ("q_norm", "k_norm")
_NORM_ERROR = 0.01  # largest relative error (norm) of a norm that is recognised: bfloat16 rounds by less than 0.4 %
_ACTIVATION_ERROR = 1e-4  # largest error of an activation that is recognised: GELU's approximation differs by more


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What a decoder layer computes between its linear layers qkv, out, gate_up and down. Norms may be left out (None).

    hidden += residual_scale · attended_norm(out(attention(qkv(input_norm(hidden)))))
    hidden += residual_scale · computed_norm(down(activation(gate) · up)) with gate and up from mlp_norm(hidden)
    """

    layer_idx: int
    shape: HeadShape
    scaling: float  # of attention scores
    softcap: float | None
    rotates: bool  # False: positions have no effect
    input_norm: Norm
    attended_norm: Norm | None
    mlp_norm: Norm
    computed_norm: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    activation: Activation
    residual_scale: float
    attention_type: str | None  # some models read this attribute of a layer to choose a mask


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The linear layers of a decoder layer, and its form."""

    form: LayerForm
    qkv: Sequence[nn.Linear]
    out: nn.Linear
    gate_up: Sequence[nn.Linear]
    down: nn.Linear

    @property
    def linears(self) -> Sequence[nn.Linear]:
        return (*self.qkv, self.out, *self.gate_up, self.down)


def parts_of(layer: Any) -> LayerParts | None:
    """Return the parts of `layer`, a layer of a transformers model; None if it has other ones.

    Other arithmetic between the same modules is not seen here: a trial of the layer must find it.
    """
    names = _children(layer)
    norm_names = next((norms for norms in _NORMS if {"self_attn", "mlp", *filter(None, norms)} == names), None)
    if norm_names is None:
        return None
    attn, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = _only(_QKV, attn, {"o_proj", "rotary_emb", *_HEAD_NORMS}), _only(_GATE_UP, mlp, {"down_proj"})
    if qkv is None or gate_up is None or any(True for _ in attn.parameters(recurse=False)):  # such as attention sinks
        return None
    linears = (*qkv, attn.o_proj, *gate_up, mlp.down_proj)
    is_plain = all(map(is_plain_linear, linears)) and len(set(map(type, linears))) == 1
    shape = _head_shape(attn, qkv) if is_plain else None
    activation = _activation_of(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None))
    if shape is None or activation is None:
        return None
    weight = attn.o_proj.weight
    hidden = [_norm_of(getattr(layer, name), weight.shape[0], weight.dtype) if name else None for name in norm_names]
    query_norm, key_norm = (_norm_of(getattr(attn, n, None), shape.head_dim, weight.dtype) for n in _HEAD_NORMS)
    found = [norm is not None for norm in (*hidden, query_norm, key_norm)]
    if found != [*map(bool, norm_names), *(name in _children(attn) for name in _HEAD_NORMS)]:
        return None
    input_norm, attended_norm, mlp_norm, computed_norm = hidden
    assert input_norm is not None and mlp_norm is not None, "all forms have these"
    form = LayerForm(
        int(attn.layer_idx),
        shape,
        float(attn.scaling),
        getattr(attn, "attn_logit_softcapping", None),
        bool(getattr(attn, "use_rope", True)),
        input_norm,
        attended_norm,
        mlp_norm,
        computed_norm,
        query_norm,
        key_norm,
        activation,
        float(getattr(layer, "residual_multiplier", 1.0)),
        getattr(layer, "attention_type", None),
    )
    return LayerParts(form, qkv, attn.o_proj, gate_up, mlp.down_proj)


def is_plain_linear(module: Any) -> bool:
    """Return whether `module` is one of our quantised layers, or an unchanged linear layer with a plain weight."""
    if type(module) is QuantizedLinear:
        return True
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _children(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}


def _only(choices: Iterable[Sequence[str]], module: nn.Module, others: set[str]) -> list[Any] | None:
    """Return the modules of the one choice that `module` has; None if it has children other than these and `others`."""
    names = _children(module) - {"act_fn", "activation_fn"}
    for choice in choices:
        if set(choice) <= names <= {*choice, *others}:
            return [getattr(module, name) for name in choice]
    return None


def _head_shape(attn: Any, qkv: Sequence[nn.Linear]) -> HeadShape | None:
    """Return the shape of the heads; None if the projections do not have the sizes of queries, keys and values."""
    if not all(hasattr(attn, name) for name in ("head_dim", "scaling", "layer_idx")):
        return None
    dim, query = int(attn.head_dim), attn.o_proj.in_features
    widths = [linear.out_features for linear in qkv]
    kv = (sum(widths) - query) // 2
    if len(widths) == 3 and widths != [query, kv, kv]:
        return None
    is_whole = kv > 0 and sum(widths) == query + 2 * kv and query % dim == kv % dim == 0 and query % kv == 0
    return HeadShape(query // dim, kv // dim, dim) if is_whole else None


@torch.inference_mode()
def _norm_of(module: Any, size: int, dtype: torch.dtype) -> Norm | None:
    """Return the norm that `module` computes; None if it is no RMS norm of `size` numbers in `dtype`."""
    if not isinstance(module, nn.Module):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = {name: (tuple(p.shape), p.dtype) for name, p in module.named_parameters()}
    if not isinstance(eps, float) or parameters != {"weight": ((size,), dtype)}:
        return None
    weight: Tensor = module.weight.detach().float().contiguous()  # type: ignore[operator]
    x = 3 * torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, dtype)
    expected = module(x).float()
    candidates = [Norm(weight + offset, eps, rounds) for offset in (0, 1) for rounds in (True, False)]
    errors = [float((norm(x).float() - expected).norm()) for norm in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    return candidates[best] if errors[best] <= _NORM_ERROR * float(expected.norm()) else None


@torch.inference_mode()
def _activation_of(function: Any) -> Activation | None:
    gate = torch.linspace(-6, 6, 101)
    if not callable(function):
        return None
    found = function(gate)
    return next((a for a in Activation if bool((a(gate) - found).abs().max() <= _ACTIVATION_ERROR)), None)
