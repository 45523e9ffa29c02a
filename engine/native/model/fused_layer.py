"""A decoder layer computed in eight to ten calls instead of about sixty.

Knows the arithmetic of a `LayerForm` and the layout of the KV cache; does not know which layers of a model have these
parts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engine.native.attention.paged import PagedAttention
from engine.native.model.layer_kernels import LayerKernels, Norm
from engine.native.model.layer_parts import LayerParts, Rotation
from engine.native.model.mlp_parts import Mlp
from engine.native.model.quantized import concatenate_linears

Join = Callable[[Sequence[nn.Linear]], nn.Module]  # joins linear layers that read the same input into one layer


class FusedDecoderLayer(nn.Module):
    """A decoder layer with the `parts` of another one, with a copy of its weights. Input and output are (1, T, hidden).

    The residual stream is changed in place: the output is the same tensor as the input. Experts, and MLPs of other
    forms, are computed by transformers' module.
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
        self._mlp = _JoinedMlp(parts.mlp, kernels, join) if isinstance(parts.mlp, Mlp) else _Block(parts.block)

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: object) -> Tensor:
        """Compute the layer on `hidden_states` (1, T, hidden) in place.

        `position_embeddings` are the model's cosines and sines, (1, T, angles) each.
        """
        residual = hidden_states[0]
        self._attention.enter_layer()
        form, kernels = self._form, self._kernels
        x = residual if form.input_norm is None else kernels.rms_norm(residual, form.input_norm)
        added = self._branch(self._out(self._attend(x, position_embeddings)), form.attended_norm)
        norm = form.mlp_norm
        x = residual.add_(added) if norm is None else kernels.add_rms_norm(residual, added, norm)
        residual.add_(self._branch(self._mlp(x), form.computed_norm))
        return hidden_states

    def _branch(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return what a branch with the output `x` (T, hidden) adds to the residual stream."""
        x = x if norm is None else self._kernels.rms_norm(x, norm)
        return x if self._form.residual_scale == 1 else x * self._form.residual_scale

    def _attend(self, normed: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attention result (T, heads × head_dim) for `normed` (T, hidden)."""
        form, attention = self._form, self._attention
        shape, qkv, rotation = form.shape, self._qkv(normed), form.rotation
        cosines, sines = (t[0].to(qkv.dtype) for t in position_embeddings)
        if rotation is None:
            cosines, sines, rotation = torch.ones_like(cosines), torch.zeros_like(sines), Rotation()
        cosines, sines = (rotation.twice(t).contiguous() for t in (cosines, sines))
        cache, slot_ids = attention.layer(form.layer_idx), attention.step.slot_ids
        norms = (form.query_norm, form.key_norm)
        self._kernels.rotate_and_write(
            qkv, shape, cache.slots, slot_ids, cosines, sines, *norms, rotation.in_pairs, cache.scales
        )
        widths = (shape.query_width, shape.kv_width, shape.kv_width)
        query, key, value = (
            part.unflatten(1, (-1, shape.head_dim)).transpose(0, 1) for part in qkv.split(widths, dim=1)
        )
        attended = attention.attend(form.layer_idx, query, key, value, form.scaling, form.softcap, form.sinks)
        return attended.flatten(1)


class _JoinedMlp(nn.Module):
    """An MLP with one product for gate and up."""

    def __init__(self, mlp: Mlp, kernels: LayerKernels, join: Join) -> None:
        super().__init__()
        self._gate_up, self._down = join(mlp.gate_up), join([mlp.down])
        self._kernels, self._activation = kernels, mlp.activation

    def forward(self, x: Tensor) -> Tensor:
        """Return (T, hidden) for `x` (T, hidden)."""
        activated: Tensor = self._down(self._kernels.activate_and_mul(self._gate_up(x), self._activation))
        return activated


class _Block(nn.Module):
    """A module of transformers in place of an MLP."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block = block

    def forward(self, x: Tensor) -> Tensor:
        """Return (T, hidden) for `x` (T, hidden)."""
        output = self._block(x[None])
        result: Tensor = output if isinstance(output, Tensor) else output[0]  # the router's results may follow
        return result[0]
