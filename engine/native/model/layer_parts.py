"""What a decoder layer computes, as data: its projections, norms, rotation, residuals and MLP.

Knows which modules the layers of transformers' models have; does not know how a layer is computed. What a module
computes is found by trying it on a few numbers: a norm may add 1 to its weight, and a class name tells neither.
"""

import inspect
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.native.attention.kernels import HeadShape
from engine.native.model.layer_kernels import Norm
from engine.native.model.mlp_parts import Experts, Mlp, children_of, is_plain_linear, mlp_of, only_choice

# The norms of a layer by their names: before attention, after it, before the MLP and after it. Llama and most others;
# Gemma 2 and 3; OLMo 2; GLM 4.
_NORMS: Sequence[tuple[str | None, str | None, str | None, str | None]] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))  # the second as in Phi-3
_HEAD_NORMS = ("q_norm", "k_norm")
_NORM_ERROR = 0.01  # largest relative error (norm) of a norm that is recognised: bfloat16 rounds by less than 0.4 %


@dataclass(frozen=True, slots=True)
class Rotation:
    """Which two numbers of a head an angle rotates: those half a head apart, or `in_pairs` those beside each other.

    With `angles_once`, the model has a cosine and a sine for each angle; else it has all of them twice.
    """

    in_pairs: bool = False
    angles_once: bool = False

    def twice(self, x: Tensor) -> Tensor:
        """Return the cosines or sines of the model with those of all angles twice."""
        return torch.cat((x, x), dim=-1) if self.angles_once else x

    def __call__(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Return `x` (…, n) rotated by definition; cosines and sines are (…, n / 2)."""
        first, second = (x[..., ::2], x[..., 1::2]) if self.in_pairs else x.chunk(2, dim=-1)
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return torch.stack(turned, dim=-1).flatten(-2) if self.in_pairs else torch.cat(turned, dim=-1)


@dataclass(frozen=True, slots=True)
class LayerForm:
    """What a decoder layer computes between its linear layers qkv and out and its MLP. Norms may be left out (None).

    hidden += residual_scale · attended_norm(out(attention(qkv(input_norm(hidden)))))
    hidden += residual_scale · computed_norm(mlp(mlp_norm(hidden)))
    """

    layer_idx: int
    shape: HeadShape
    scaling: float  # of attention scores
    softcap: float | None
    sinks: Tensor | None  # (heads,), float32: see `Scoring`
    rotation: Rotation | None  # None: positions have no effect
    input_norm: Norm | None
    attended_norm: Norm | None
    mlp_norm: Norm | None
    computed_norm: Norm | None
    query_norm: Norm | None  # of each head, or of all heads together
    key_norm: Norm | None
    residual_scale: float
    attention_type: str | None  # some models read this attribute of a layer to choose a mask


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The linear layers of a decoder layer, its MLP, and its form."""

    form: LayerForm
    qkv: Sequence[nn.Linear]
    out: nn.Linear
    block: nn.Module  # of transformers: the MLP
    mlp: Mlp | Experts | None  # what the block computes; None: only the block itself knows

    @property
    def linears(self) -> Sequence[nn.Linear]:
        return (*self.qkv, self.out, *(self.mlp.linears if isinstance(self.mlp, Mlp) else ()))


def parts_of(layer: Any) -> LayerParts | None:
    """Return the parts of `layer`, a layer of a transformers model; None if it has other ones.

    Other arithmetic between the same modules is not seen here: a trial of the layer must find it.
    """
    names = children_of(layer)
    norm_names = next((norms for norms in _NORMS if {"self_attn", "mlp", *filter(None, norms)} == names), None)
    qkv = only_choice(_QKV, layer.self_attn, {"o_proj", "rotary_emb", *_HEAD_NORMS}) if norm_names else None
    if norm_names is None or qkv is None or not all(map(is_plain_linear, (*qkv, layer.self_attn.o_proj))):
        return None
    attn, out = layer.self_attn, layer.self_attn.o_proj
    shape, own = _head_shape(attn, qkv), {name: p for name, p in attn.named_parameters(recurse=False)}
    if shape is None or not own.keys() <= {"sinks"} or _needs_positions(attn):
        return None
    hidden, dtype = out.weight.shape[0], out.weight.dtype
    norms = [_norm_of(getattr(layer, name), (hidden,), dtype) if name else None for name in norm_names]
    query_norm = _norm_of(getattr(attn, "q_norm", None), (shape.head_dim, shape.query_width), dtype)
    key_norm = _norm_of(getattr(attn, "k_norm", None), (shape.head_dim, shape.kv_width), dtype)
    found = [norm is not None for norm in (*norms, query_norm, key_norm)]
    if found != [*map(bool, norm_names), *(name in children_of(attn) for name in _HEAD_NORMS)]:
        return None
    input_norm, attended_norm, mlp_norm, computed_norm = norms
    form = LayerForm(
        int(attn.layer_idx),
        shape,
        float(attn.scaling),
        getattr(attn, "attn_logit_softcapping", None),
        own["sinks"].detach().float().contiguous() if own else None,
        _rotation_of(attn, shape.head_dim) if getattr(attn, "use_rope", True) else None,
        input_norm,
        attended_norm,
        mlp_norm,
        computed_norm,
        query_norm,
        key_norm,
        float(getattr(layer, "residual_multiplier", 1.0)),
        getattr(layer, "attention_type", None),
    )
    parts = LayerParts(form, qkv, out, layer.mlp, mlp_of(layer.mlp))
    return parts if len(set(map(type, parts.linears))) == 1 else None


def _needs_positions(attn: Any) -> bool:
    """Return whether `attn` computes more with positions than a rotation, such as a scale of queries (Ministral 3).

    A trial may miss it: the scale of its few positions may be within the rounding of bfloat16, or 1.
    """
    parameter = inspect.signature(attn.forward).parameters.get("position_ids")
    return parameter is not None and parameter.default is inspect.Parameter.empty


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
def _rotation_of(attn: Any, head_dim: int) -> Rotation:
    """Return how the function for it, beside the class of `attn`, rotates heads; the usual way if that is not found."""
    rotate: Any = getattr(sys.modules[type(attn).__module__], "apply_rotary_pos_emb", None)
    x = torch.randn(1, 1, 1, head_dim, generator=torch.Generator().manual_seed(0))
    angles = x[0, ..., : head_dim // 2] * 2
    for rotation in (Rotation(), Rotation(in_pairs=True), Rotation(angles_once=True)):
        given = [t if rotation.angles_once else torch.cat((t, t), dim=-1) for t in (angles.cos(), angles.sin())]
        with suppress(Exception):  # such as cosines of another size
            if torch.allclose(rotate(x, x, *given)[0], rotation(x, angles.cos(), angles.sin()), atol=1e-5):
                return rotation
    return Rotation()


@torch.inference_mode()
def _norm_of(module: Any, sizes: Collection[int], dtype: torch.dtype) -> Norm | None:
    """Return the norm that `module` computes; None if it is no RMS norm in `dtype` of one of these sizes."""
    if not isinstance(module, nn.Module):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = {name: (tuple(p.shape), p.dtype) for name, p in module.named_parameters()}
    if not isinstance(eps, float) or parameters not in [{"weight": ((size,), dtype)} for size in sizes]:
        return None
    weight: Tensor = module.weight.detach().float().contiguous()  # type: ignore[operator]
    x = 3 * torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, dtype)
    expected = module(x).float()
    candidates = [Norm(weight + offset, eps, rounds) for offset in (0, 1) for rounds in (True, False)]
    errors = [float((norm(x).float() - expected).norm()) for norm in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    return candidates[best] if errors[best] <= _NORM_ERROR * float(expected.norm()) else None
