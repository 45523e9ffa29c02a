"""Attention over paged KV, as transformers' modeling code calls it: once a layer, over a packed step.

Knows rows, keys, values and scores; not sequences, sampling or the model around it. Decode rows of a group
are batched matrix products with the query heads of a KV head packed as rows; on a CPU this is two to seven
times as fast as SDPA, which sees many tiny attentions. Prefill chunks go through SDPA one sequence at a time.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from engine.kv_cache import KVCache, LayerCache
from engine.step_tensors import DecodeTensors, PrefillTensors, StepTensors

ATTENTION_NAME = "tidegate_paged"
_BINDING = "tidegate_attention"


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


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. No mask is registered under that name, so modeling code
    makes none: rows know their contexts, layers their windows."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def bind(model: nn.Module, attention: LayerAttention) -> None:
    """Make `attention` what the model's modules call. It is bound to them and not passed through `forward`,
    since not every architecture hands arguments down that it does not know."""
    for module in model.modules():
        setattr(module, _BINDING, attention)


class PagedAttention:
    """Bound to a model for good; `begin` tells it the step that the next forward pass computes."""

    def __init__(self, cache: KVCache, windows: list[int | None]) -> None:
        self._cache = cache
        self._windows = windows  # by layer: how many tokens a row sees, itself included; None: all
        self._step: StepTensors | None = None

    def begin(self, step: StepTensors) -> None:
        self._step = step

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
        if self._step is None:
            raise RuntimeError("attention was called outside of a step")
        layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
        layer, window = self._cache.layers[layer_idx], self._windows[layer_idx]
        rule = _Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
        layer.write(key, value, self._step.slot_rows(layer.shape.num_kv_heads))
        parts = [_decode(layer, group, query, rule) for group in self._step.decode_groups]
        parts += [_prefill(layer, chunk, query, key, value, rule) for chunk in self._step.prefill_chunks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


class _Scoring:
    """How a layer turns products of queries and keys into weights."""

    __slots__ = ("scaling", "window", "softcap", "sinks")

    def __init__(self, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> None:
        self.scaling = scaling
        self.window = window
        self.softcap = softcap  # scores are squashed into ± softcap (Gemma 2)
        self.sinks = sinks  # (heads,): a score of nothing, that takes its share of the softmax (gpt-oss)

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def weights(self, query: Tensor, key: Tensor, bias: Tensor, sinks: Tensor | None) -> Tensor:
        """(N, rows, d), (N, L, d), bias broadcastable to (N, rows, L), sinks (N, rows, 1): (N, rows, L)."""
        if self.softcap is None:
            scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=self.scaling)
        else:
            scores = torch.bmm(query, key.transpose(1, 2)).mul_(self.scaling / self.softcap)
            scores = scores.tanh_().mul_(self.softcap).add_(bias)
        if sinks is None:
            return scores.softmax(-1)
        return torch.cat((scores, sinks.to(scores.dtype)), dim=-1).softmax(-1)[..., :-1]


def _decode(layer: LayerCache, group: DecodeTensors, query: Tensor, rule: _Scoring) -> Tensor:
    """One new token of each sequence of a group against its whole context: (num_seqs, heads, head_dim)."""
    kv_heads, num_seqs = layer.shape.num_kv_heads, group.num_seqs
    keys, values = layer.gather(group.block_rows(kv_heads), num_seqs)
    grouped = _by_kv_head(query[0, :, group.rows], kv_heads)  # (kv_heads, heads of a group, seqs, d)
    num_rows, head_dim = grouped.shape[1], grouped.shape[3]
    packed = grouped.transpose(1, 2).reshape(kv_heads * num_seqs, num_rows, head_dim)
    bias = group.bias(kv_heads, rule.window, keys.shape[1], query.dtype)
    sinks = rule.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, 1, num_rows, 1).expand(-1, num_seqs, -1, -1).reshape(-1, num_rows, 1)
    attended = torch.bmm(rule.weights(packed, keys, bias, sinks), values)
    return attended.view(kv_heads, num_seqs, num_rows, -1).transpose(0, 1).reshape(num_seqs, -1, head_dim)


def _by_kv_head(query: Tensor, kv_heads: int) -> Tensor:
    """(heads, T, head_dim) to (kv_heads, heads of a group, T, head_dim)."""
    heads, num_tokens, head_dim = query.shape
    return query.view(kv_heads, heads // kv_heads, num_tokens, head_dim)


def _prefill(
    layer: LayerCache, chunk: PrefillTensors, query: Tensor, key: Tensor, value: Tensor, rule: _Scoring
) -> Tensor:
    """The tokens of one chunk against what is cached and each other: (tokens, heads, head_dim)."""
    kv_heads = layer.shape.num_kv_heads
    if chunk.start == 0:  # everything it looks at is at hand
        keys, values = key[0, :, chunk.rows], value[0, :, chunk.rows]
    else:
        keys, values = layer.gather(chunk.block_rows(kv_heads), 1)
        keys, values = keys[:, : chunk.end], values[:, : chunk.end]
    grouped = _by_kv_head(query[0, :, chunk.rows], kv_heads)  # (kv_heads, heads of a group, tokens, d)
    attend = _attend_by_sdpa if rule.is_plain else _attend_by_products
    return attend(chunk, grouped, keys, values, rule).flatten(0, 1).transpose(0, 1)


def _attend_by_sdpa(chunk: PrefillTensors, query: Tensor, keys: Tensor, values: Tensor, rule: _Scoring) -> Tensor:
    """KV heads as the batch and the heads of a group with stride 0 on K and V: nothing is repeated in memory."""
    group = query.shape[1]
    is_causal = chunk.is_plain_causal(rule.window)
    return scaled_dot_product_attention(
        query,
        keys[:, None].expand(-1, group, -1, -1),
        values[:, None].expand(-1, group, -1, -1),
        attn_mask=None if is_causal else chunk.bias(rule.window, query.dtype),
        is_causal=is_causal,
        scale=rule.scaling,
    )


def _attend_by_products(chunk: PrefillTensors, query: Tensor, keys: Tensor, values: Tensor, rule: _Scoring) -> Tensor:
    """For scores that SDPA cannot make: the heads of a group packed as rows."""
    kv_heads, group, num_tokens, head_dim = query.shape
    packed = query.reshape(kv_heads, group * num_tokens, head_dim)
    bias = chunk.bias(rule.window, query.dtype).repeat(group, 1)
    sinks = rule.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, group, 1).expand(-1, -1, num_tokens).reshape(kv_heads, -1, 1)
    return torch.bmm(rule.weights(packed, keys, bias, sinks), values).view(query.shape)
