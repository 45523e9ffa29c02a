"""Causal attention for training on short rows on a CPU, registered with transformers.

Plain batched matrix products with the query heads of a KV head packed as rows; softmax in bf16. Forward and backward of
4,096 tokens in rows of 64 took 5.6 ms a layer, against 12 ms for transformers' eager attention and 38 ms for torch's
flash kernel (one core, avx512_bf16); the flash kernel is faster for rows of about 1,024 tokens and more. For training
only: right-padded rows, no cache.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "short_rows"


def register() -> None:
    """Register the attention as NAME, for `set_attn_implementation`. It may be called twice."""
    AttentionInterface.register(NAME, short_rows_attention)


def short_rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Map `query` (rows, heads, T, d), `key` and `value` (rows, kv heads, T, d) to (rows, T, heads, d)."""
    if attention_mask is not None:
        raise ValueError("short_rows attention is causal only and takes no mask")
    rows, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    packed = query.reshape(rows * kv_heads, heads // kv_heads * length, dim)
    future = torch.full((length, length), float("-inf"), dtype=query.dtype).triu(1).repeat(heads // kv_heads, 1)
    keys, values = (kv.reshape(rows * kv_heads, length, dim) for kv in (key, value))
    scores = torch.baddbmm(future, packed, keys.transpose(1, 2), alpha=scaling)
    mixed = torch.bmm(scores.softmax(-1), values)
    return mixed.view(rows, heads, length, dim).transpose(1, 2).contiguous(), None
