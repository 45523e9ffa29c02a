"""Attention over paged KV, as transformers' modeling code calls it: once a layer, over a packed step.

Knows rows, layers and which backend attends for them: kernels that read blocks where they lie, if there are any for a
layer's shape, else torch's operators. Not sequences, sampling or the model around it.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.native.attention.kernels import AttentionKernels, HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.attention.torch_fallback import decode, prefill
from engine.native.batch.tensors import DecodeTensors, PrefillGroup, StepTensors
from engine.native.kv.cache import KVCache, LayerCache

ATTENTION_NAME = "tidegate_paged"
_BINDING = "tidegate_attention"

Boundary = Callable[[StepTensors], tuple[StepTensors, Tensor] | None]  # as `LayerBoundary`


class LayerAttention(Protocol):
    """(1, heads, T, head_dim) queries and (1, kv_heads, T, head_dim) keys and values in, (1, T, heads, head_dim)
    out. `options` are what the architecture passes beyond them."""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor: ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers; it finds its engine on the module that calls it."""
    attention: LayerAttention = getattr(module, _BINDING)
    return attention(module, query, key, value, attention_mask=attention_mask, **options), None


def bind(model: nn.Module, attention: LayerAttention) -> None:
    """Make `attention` what the model's modules call. It is bound to them and not passed through `forward`,
    since not every architecture hands arguments down that it does not know."""
    for module in model.modules():
        setattr(module, _BINDING, attention)


class PagedAttention:
    """Bound to a model for good; `begin` tells it the step that the next forward pass computes."""

    def __init__(self, cache: KVCache, windows: list[int | None], kernels: AttentionKernels | None = None) -> None:
        self._cache = cache
        self._windows = windows  # by layer: how many tokens a row sees, itself included; None: all
        self._kernels = kernels
        self._step: StepTensors | None = None
        self._boundary: Boundary | None = None
        self.decodes_in_kernels = kernels is not None  # False once a layer had none for its shape

    def begin(self, step: StepTensors, boundary: Boundary | None = None) -> None:
        """`boundary`: what comes before each layer of the pass."""
        self._step, self._boundary = step, boundary

    def enter_layer(self) -> Tensor | None:
        """Each layer calls it before it looks at `step`. Where sequences have left the step: which of its rows until
        now are those of the new one. Raises `StepEvicted` when all have."""
        crossed = None if self._boundary is None else self._boundary(self.step)
        if crossed is None:
            return None
        self._step, staying = crossed
        return staying

    @property
    def step(self) -> StepTensors:
        if self._step is None:
            raise RuntimeError("attention was called outside of a step")
        return self._step

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    def layer(self, layer_idx: int) -> LayerCache:
        return self._cache.layers[layer_idx]

    def scoring(
        self, layer_idx: int, scaling: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Scoring:
        return Scoring(scaling, softcap, self._windows[layer_idx], sinks)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if self.enter_layer() is not None:
            raise RuntimeError("rows left a layer that cannot go on without them")
        layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
        layer = self._cache.layers[layer_idx]
        layer.write(key, value, self.step.slot_rows(layer.shape.num_kv_heads))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.attend(layer_idx, query[0], key[0], value[0], scaling, softcap, s_aux)[None]

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """(heads, T, head_dim) queries, (kv_heads, T, head_dim) keys and values that the cache holds already:
        (T, heads, head_dim)."""
        layer = self._cache.layers[layer_idx]
        scoring = self.scoring(layer_idx, scaling, softcap, sinks)
        parts = [self._decode(layer, group, query[:, group.rows], scoring) for group in self.step.decode_groups]
        if self.step.prefills is not None:
            parts += self._prefill(layer, self.step.prefills, query, key, value, scoring)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _kernels_for(self, query: Tensor, layer: LayerCache) -> AttentionKernels | None:
        shape = HeadShape(query.shape[0], layer.shape.num_kv_heads, layer.shape.head_dim)
        return self._kernels if self._kernels is not None and self._kernels.can_attend(shape) else None

    def _decode(self, layer: LayerCache, group: DecodeTensors, query: Tensor, scoring: Scoring) -> Tensor:
        kernels = self._kernels_for(query, layer)
        if kernels is None:
            self.decodes_in_kernels = False
            return decode(layer, group, query, scoring)
        paged = PagedRows(layer.slots, group.block_table, group.context_lens, self._cache.block_size)
        return kernels.paged_decode(_dense(query), layer.shape.num_kv_heads, paged, scoring)

    def _prefill(
        self, layer: LayerCache, group: PrefillGroup, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> list[Tensor]:
        """(tokens, heads, head_dim) of all chunks at once, or of one after another."""
        kernels = self._kernels_for(query, layer)
        if kernels is not None:
            chunks = PagedChunks(layer.slots, group.tables, group.extents, self._cache.block_size, group.longest)
            own = _dense(query[:, group.rows])
            attended = kernels.paged_prefill(own, layer.shape.num_kv_heads, chunks, scoring)
            if attended is not None:
                return [attended]
        return [
            prefill(layer, chunk, query[:, chunk.rows], key[:, chunk.rows], value[:, chunk.rows], scoring)
            for chunk in group.chunks
        ]


def _dense(query: Tensor) -> Tensor:
    """Its last dimension contiguous."""
    return query if query.stride(-1) == 1 else query.contiguous()
