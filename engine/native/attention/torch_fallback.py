"""Attention over paged KV with torch's operators, for every device and every kind of scoring.

The decode rows of a group are computed by batched matrix products, in which the query heads of a KV head are packed as
rows. On a CPU this is two to seven times as fast as SDPA, which computes many tiny attentions instead. Prefill chunks
are computed by SDPA, one sequence at a time. Knows rows, keys, values and scores; does not know layer indices or the
model.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.native.attention.kernels import Scoring
from engine.native.batch.tensors import DecodeTensors, PrefillTensors
from engine.native.kv.cache import LayerCache


def decode(layer: LayerCache, group: DecodeTensors, query: Tensor, scoring: Scoring) -> Tensor:
    """Return the attention of one new token of each sequence of a group to the whole context of its sequence.

    `query` is (heads, num_seqs, head_dim). The result is (num_seqs, heads, head_dim).
    """
    kv_heads, num_seqs = layer.shape.num_kv_heads, group.num_seqs
    keys, values = layer.gather(group.block_rows.of(kv_heads), num_seqs)
    grouped = _by_kv_head(query, kv_heads)  # (kv_heads, query heads per KV head, num_seqs, head_dim)
    num_rows, head_dim = grouped.shape[1], grouped.shape[3]
    packed = grouped.transpose(1, 2).reshape(kv_heads * num_seqs, num_rows, head_dim)
    bias = group.bias(kv_heads, scoring.window, keys.shape[1], query.dtype)
    sinks = scoring.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, 1, num_rows, 1).expand(-1, num_seqs, -1, -1).reshape(-1, num_rows, 1)
    attended = torch.bmm(_weights(scoring, packed, keys, bias, sinks), values)
    return attended.view(kv_heads, num_seqs, num_rows, -1).transpose(0, 1).reshape(num_seqs, -1, head_dim)


def prefill(
    layer: LayerCache, chunk: PrefillTensors, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> Tensor:
    """Return the attention of each token of a chunk to the tokens of its sequence up to its own position.

    `query` is (heads, tokens, head_dim), `key` and `value` are (kv_heads, tokens, head_dim) of the chunk. The result is
    (tokens, heads, head_dim).
    """
    kv_heads = layer.shape.num_kv_heads
    # If the chunk's own keys and values are the whole context, they need no gathering. But those of FP8 must be what
    # later tokens find in the cache, however a prompt is split into chunks.
    if chunk.start == 0 and layer.scales is None:
        keys, values = key, value
    else:
        keys, values = layer.gather(chunk.block_rows.of(kv_heads), 1)
        keys, values = keys[:, : chunk.end], values[:, : chunk.end]
    grouped = _by_kv_head(query, kv_heads)  # (kv_heads, query heads per KV head, tokens, head_dim)
    attend = _attend_by_sdpa if _is_plain(scoring) else _attend_by_products
    return attend(chunk, grouped, keys, values, scoring).flatten(0, 1).transpose(0, 1)


def _by_kv_head(query: Tensor, kv_heads: int) -> Tensor:
    """Reshape (heads, T, head_dim) to (kv_heads, query heads per KV head, T, head_dim)."""
    return query.reshape(kv_heads, -1, *query.shape[1:])


def _attend_by_sdpa(chunk: PrefillTensors, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Return the attention of a chunk, computed by SDPA.

    The KV heads are the batch dimension. Keys and values have stride 0 over the query heads of a KV head, so they are
    not repeated in memory. `query` and the result are (kv_heads, query heads per KV head, tokens, head_dim); `keys` and
    `values` are (kv_heads, context, head_dim).
    """
    group = query.shape[1]
    is_causal = chunk.is_plain_causal(scoring.window)
    return scaled_dot_product_attention(
        query,
        keys[:, None].expand(-1, group, -1, -1),
        values[:, None].expand(-1, group, -1, -1),
        attn_mask=None if is_causal else chunk.bias(scoring.window, query.dtype),
        is_causal=is_causal,
        scale=scoring.scaling,
    )


def _attend_by_products(chunk: PrefillTensors, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Return the attention of a chunk, computed by matrix products.

    This is for scoring that SDPA does not support (softcap, sinks). Shapes are those of `_attend_by_sdpa`. The query
    heads of a KV head are packed as rows of one product.
    """
    kv_heads, group, num_tokens, head_dim = query.shape
    packed = query.reshape(kv_heads, group * num_tokens, head_dim)
    bias = chunk.bias(scoring.window, query.dtype).repeat(group, 1)
    sinks = scoring.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, group, 1).expand(-1, -1, num_tokens).reshape(kv_heads, -1, 1)
    return torch.bmm(_weights(scoring, packed, keys, bias, sinks), values).view(query.shape)


def _is_plain(scoring: Scoring) -> bool:
    return scoring.softcap is None and scoring.sinks is None


def _weights(scoring: Scoring, query: Tensor, key: Tensor, bias: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the attention weights (N, rows, L) of `query` (N, rows, head_dim) for `key` (N, L, head_dim).

    `bias` is broadcastable to (N, rows, L); `sinks` are (N, rows, 1).
    """
    if scoring.softcap is None:
        scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scoring.scaling)
    else:
        scores = torch.bmm(query, key.transpose(1, 2)).mul_(scoring.scaling / scoring.softcap)
        scores = scores.tanh_().mul_(scoring.softcap).add_(bias)
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.to(scores.dtype)), dim=-1).softmax(-1)[..., :-1]
