"""Attention over paged KV, called by transformers' modeling code once per layer for the packed rows of a step.

A backend's kernels read KV blocks in place. Layers whose shape the kernels do not support use torch's operators. Knows
rows, layers and backends; does not know sequences, sampling or the rest of the model.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.native.attention.kernels import AttentionKernels, HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.attention.torch_fallback import decode, prefill
from engine.native.batch.tensors import DecodeTensors, PrefillGroup, StepTensors
from engine.native.kv.cache import KVCache, LayerCache

ATTENTION_NAME = "tidegate_paged"
_BINDING = "tidegate_attention"


class LayerAttention(Protocol):
    """The attention function of one layer, for a packed step of T rows.

    `query` is (1, heads, T, head_dim); `key` and `value` are (1, kv_heads, T, head_dim); all are in the model's dtype.
    The result is (1, T, heads, head_dim). `options` are further arguments that the architecture passes to its
    attention.
    """

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor: ...


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Call the attention that `bind` stored on `module`.

    This function is registered in transformers' `AttentionInterface`. Shapes are those of `LayerAttention`, except that
    keys and values may have heads of different sizes, as in latent attention (DeepSeek and its successors). They are
    padded to one size, which does not change the result: zeros in a key or query add nothing to a score, and zeros in a
    value give zeros, which are cut off. None takes the place of attention weights.
    """
    attention: LayerAttention = getattr(module, _BINDING)
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    if key_dim != value_dim:
        if options.get("scaling") is None:
            options["scaling"] = key_dim**-0.5
        wide = max(key_dim, value_dim)
        query, key, value = (pad(heads, (0, wide - heads.shape[-1])) for heads in (query, key, value))
    attended = attention(module, query, key, value, attention_mask=attention_mask, **options)
    return attended[..., :value_dim].contiguous(), None


def bind(model: nn.Module, attention: LayerAttention) -> None:
    """Make all modules of `model` call `attention`.

    The attention is stored on the modules, because some architectures do not pass unknown arguments of `forward` to
    their layers.
    """
    for module in model.modules():
        setattr(module, _BINDING, attention)


class PagedAttention:
    """The attention of one model over one KV cache. `begin` sets the step that the next forward pass computes."""

    def __init__(self, cache: KVCache, windows: list[int | None], kernels: AttentionKernels | None = None) -> None:
        self._cache = cache
        self._windows = windows  # by layer: number of tokens that a row attends to, itself included; None: all
        self._kernels = kernels
        self._step: StepTensors | None = None
        self._between_layers: Callable[[], None] | None = None
        # Becomes False when torch's operators attend. These gather whole blocks, with slots that are not written yet.
        self.in_kernels = kernels is not None

    def begin(self, step: StepTensors, between_layers: Callable[[], None] | None = None) -> None:
        """Set the step of the next forward pass. The pass calls `between_layers` before each layer."""
        self._step, self._between_layers = step, between_layers

    def enter_layer(self) -> None:
        """Let other passes run, if the step of this one is suspended. Each layer calls this before it reads `step`."""
        if (between_layers := self._between_layers) is not None:
            step = self._step
            between_layers()
            self._step, self._between_layers = step, between_layers

    @property
    def step(self) -> StepTensors:
        """The tensors of the running step. Raises `RuntimeError` before the first `begin`."""
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
        """Return the scoring of a layer. `sinks` are (heads,) or None."""
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
        """Write keys and values to the cache, and return the attention. Shapes are those of `LayerAttention`.

        `s_aux` are attention sinks (heads,).
        """
        self.enter_layer()
        layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
        layer = self._cache.layers[layer_idx]
        layer.write(key, value, self.step.slot_rows.of(layer.shape.num_kv_heads))
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
        """Return the attention of the T rows of the step, (T, heads, head_dim).

        The keys and values of these rows are already in the cache. `query` is (heads, T, head_dim), `key` and `value`
        are (kv_heads, T, head_dim).
        """
        layer = self._cache.layers[layer_idx]
        scoring = self.scoring(layer_idx, scaling, softcap, sinks)
        parts = [self._decode(layer, group, query[:, group.rows], scoring) for group in self.step.decode_groups]
        if self.step.prefills is not None:
            parts += self._prefill(layer, self.step.prefills, query, key, value, scoring)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _kernels_for(self, query: Tensor, layer: LayerCache) -> AttentionKernels | None:
        """Return the kernels; None if they do not support the shape of `query` (heads, T, head_dim) and `layer`."""
        shape = HeadShape(query.shape[0], layer.shape.num_kv_heads, layer.shape.head_dim)
        return self._kernels if self._kernels is not None and self._kernels.can_attend(shape) else None

    def _decode(self, layer: LayerCache, group: DecodeTensors, query: Tensor, scoring: Scoring) -> Tensor:
        """Return the attention (rows, heads, head_dim) of a group of decodes with queries (heads, rows, head_dim)."""
        kernels = self._kernels_for(query, layer)
        if kernels is None:
            self.in_kernels = False
            return decode(layer, group, query, scoring)
        block_size = self._cache.block_size
        paged = PagedRows(layer.slots, group.block_table, group.context_lens, block_size, layer.scales)
        return kernels.paged_decode(_dense(query), layer.shape.num_kv_heads, paged, scoring)

    def _prefill(
        self, layer: LayerCache, group: PrefillGroup, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> list[Tensor]:
        """Return the attention of all prefill chunks, in order.

        The result is one tensor for all chunks, or one tensor for each chunk; each tensor is (tokens, heads, head_dim).
        `query` is (heads, T, head_dim), `key` and `value` are (kv_heads, T, head_dim) of the whole step.
        """
        kernels = self._kernels_for(query, layer)
        if kernels is not None:
            chunks = PagedChunks(
                layer.slots,
                group.tables,
                group.extents,
                self._cache.block_size,
                group.longest,
                group.num_single,
                layer.scales,
            )
            dense = _dense(query[:, group.rows])
            attended = kernels.paged_prefill(dense, layer.shape.num_kv_heads, chunks, scoring)
            if attended is not None:
                return [attended]
        self.in_kernels = False
        return [
            prefill(layer, chunk, query[:, chunk.rows], key[:, chunk.rows], value[:, chunk.rows], scoring)
            for chunk in group.chunks
        ]


def _dense(query: Tensor) -> Tensor:
    """Return `query` with a contiguous last dimension."""
    return query if query.stride(-1) == 1 else query.contiguous()
