"""A decoder layer computed in eight to ten calls instead of about sixty.

Knows the arithmetic of a `LayerForm` and the layout of the KV cache; does not know which layers of a model have these
parts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engine.native.attention.paged import PagedAttention
from engine.native.model.layer_kernels import LayerKernels, Norm
from engine.native.model.layer_parts import LayerParts
from engine.native.model.quantized import QuantizedLinear, joined_biases

Join = Callable[[Sequence[nn.Linear]], nn.Module]  # joins linear layers that read the same input into one layer


class FusedDecoderLayer(nn.Module):
    """A decoder layer with the `parts` of another one, with a copy of its weights. Input and output are (1, T, hidden).

    The residual stream is changed in place: the output is the same tensor as the input.
    """

    def __init__(
        self, parts: LayerParts, attention: PagedAttention, kernels: LayerKernels, join: Join | None = None
    ) -> None:
        super().__init__()
        join = join or concatenate_linears
        self.attention_type = parts.form.attention_type
        self._form = parts.form
        self._attention = attention
        self._kernels = kernels
        self._qkv = join(parts.qkv)
        self._out = join([parts.out])
        self._gate_up = join(parts.gate_up)
        self._down = join([parts.down])

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: object) -> Tensor:
        """Compute the layer on `hidden_states` (1, T, hidden) in place.

        `position_embeddings` are cosines and sines, (1, T, rotary_dim) each.
        """
        residual = hidden_states[0]
        self._attention.enter_layer()
        form, kernels = self._form, self._kernels
        attended = self._attend(kernels.rms_norm(residual, form.input_norm), position_embeddings)
        added = self._branch(self._out(attended), form.attended_norm)
        normed = kernels.add_rms_norm(residual, added, form.mlp_norm)
        activated = kernels.activate_and_mul(self._gate_up(normed), form.activation)
        residual.add_(self._branch(self._down(activated), form.computed_norm))
        return hidden_states

    def _branch(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return what a branch with the output `x` (T, hidden) adds to the residual stream."""
        x = x if norm is None else self._kernels.rms_norm(x, norm)
        return x if self._form.residual_scale == 1 else x * self._form.residual_scale

    def _attend(self, normed: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attention result (T, heads × head_dim) for `normed` (T, hidden)."""
        form, attention = self._form, self._attention
        shape, qkv = form.shape, self._qkv(normed)
        cosines, sines = (t[0].to(qkv.dtype).contiguous() for t in position_embeddings)
        if not form.rotates:
            cosines, sines = torch.ones_like(cosines), torch.zeros_like(sines)
        slots = attention.layer(form.layer_idx).slots
        self._kernels.rotate_and_write(
            qkv, shape, slots, attention.step.slot_ids, cosines, sines, form.query_norm, form.key_norm
        )
        widths = (shape.query_width, shape.kv_width, shape.kv_width)
        query, key, value = (
            part.unflatten(1, (-1, shape.head_dim)).transpose(0, 1) for part in qkv.split(widths, dim=1)
        )
        return attention.attend(form.layer_idx, query, key, value, form.scaling, form.softcap).flatten(1)


def concatenate_linears(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Return one linear layer whose output is the concatenation of the outputs of `layers`, all of the same kind."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if quantized:
        return QuantizedLinear.joined(quantized)
    weight, bias = concatenated(layers)
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


def concatenated(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weights (out, in) and biases (out,) of `layers`, end to end; None if no layer has a bias."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return weight, joined_biases(layers, weight.device)
