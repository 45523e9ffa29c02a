"""A decoder layer of the common kind, computed in eight calls instead of about sixty.

A layer of the common kind has RMS norms before attention and MLP, rotary positions and a SiLU-gated MLP. Llama, Qwen,
Mistral and many other models have such layers. Knows the arithmetic of such a layer and the layout of the KV cache;
does not know which layers of a model are of this kind.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.native.attention.kernels import HeadShape
from engine.native.attention.paged import PagedAttention
from engine.native.batch.layer_boundary import compact_rows
from engine.native.model.layer_kernels import LayerKernels, Norm

Join = Callable[[Sequence[nn.Linear]], nn.Module]  # joins linear layers that read the same input into one layer


class FusedDecoderLayer(nn.Module):
    """A decoder layer that replaces `layer`, with a copy of its weights. Input and output are (1, T, hidden).

    The residual stream is changed in place: the output is the same tensor as the input.
    """

    def __init__(self, layer: Any, attention: PagedAttention, kernels: LayerKernels, join: Join | None = None) -> None:
        super().__init__()
        attn, join = layer.self_attn, join or concatenate_linears
        self.attention_type = getattr(layer, "attention_type", None)  # some models read this attribute to choose a mask
        self._layer_idx = int(attn.layer_idx)
        self._shape = head_shape(layer)
        self._scaling = float(attn.scaling)
        self._attention = attention
        self._kernels = kernels
        self._input_norm = norm_of(layer.input_layernorm)
        self._mlp_norm = norm_of(layer.post_attention_layernorm)
        self._query_norm = norm_of(attn.q_norm) if hasattr(attn, "q_norm") else None
        self._key_norm = norm_of(attn.k_norm) if hasattr(attn, "k_norm") else None
        self._qkv = join([attn.q_proj, attn.k_proj, attn.v_proj])
        self._out = join([attn.o_proj])
        self._gate_up = join([layer.mlp.gate_proj, layer.mlp.up_proj])
        self._down = join([layer.mlp.down_proj])

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """Compute the layer on `hidden_states` (1, T, hidden) in place.

        `position_embeddings` are cosines and sines, (1, T, rotary_dim) each. After evictions, only the first rows are
        computed; the other rows keep old values, which are never read.
        """
        residual = hidden_states[0]
        if (remaining := self._attention.enter_layer()) is not None:
            compact_rows(residual, remaining)
        if self._attention.step.origin is not None:
            residual = residual[: len(self._attention.step.slot_ids)]
        attended = self._attend(self._kernels.rms_norm(residual, self._input_norm), position_embeddings)
        normed = self._kernels.add_rms_norm(residual, self._out(attended), self._mlp_norm)
        activated = self._kernels.silu_and_mul(self._gate_up(normed))
        residual.add_(self._down(activated))
        return hidden_states

    def _attend(self, normed: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attention result (T, heads × head_dim) for `normed` (T, hidden)."""
        shape, attention = self._shape, self._attention
        qkv = self._qkv(normed)
        cosines, sines = (attention.step.own_rows(t[0]).to(qkv.dtype).contiguous() for t in position_embeddings)
        slots = attention.layer(self._layer_idx).slots
        self._kernels.rotate_and_write(
            qkv, shape, slots, attention.step.slot_ids, cosines, sines, self._query_norm, self._key_norm
        )
        widths = (shape.query_width, shape.kv_width, shape.kv_width)
        query, key, value = (
            part.unflatten(1, (-1, shape.head_dim)).transpose(0, 1) for part in qkv.split(widths, dim=1)
        )
        return attention.attend(self._layer_idx, query, key, value, self._scaling).flatten(1)


def head_shape(layer: Any) -> HeadShape:
    """Return the head shape of a transformers decoder layer of the common kind."""
    attn = layer.self_attn
    dim = int(attn.head_dim)
    return HeadShape(attn.q_proj.out_features // dim, attn.k_proj.out_features // dim, dim)


def norm_of(module: Any) -> Norm:
    """Return the weight and eps of an RMS norm module of transformers."""
    eps = getattr(module, "variance_epsilon", None)
    return Norm(module.weight.detach().contiguous(), float(module.eps if eps is None else eps))


def concatenate_linears(layers: Sequence[nn.Linear]) -> nn.Module:
    """Return one linear layer whose output is the concatenation of the outputs of `layers`."""
    weight, bias = concatenated(layers)
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


def concatenated(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weights (out, in) and biases (out,) of `layers`, end to end; None if no layer has a bias."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    return weight, torch.cat(biases)
