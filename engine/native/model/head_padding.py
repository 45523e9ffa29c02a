"""Pad heads whose keys and values differ in size, so that paged attention sees one head size per layer.

Latent attention (DeepSeek and its successors) and a few other architectures have such heads. Padding does not change
the result: zeros in a key or query add nothing to a score, and zeros in a value give zeros, which are cut off.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from engine.native.attention.paged import attention_forward


def attention_forward_padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Call `attention_forward` for keys and values of any head size.

    `query` is (1, heads, T, key_dim), `key` (1, kv_heads, T, key_dim), `value` (1, kv_heads, T, value_dim). Return
    the result (1, T, heads, value_dim), contiguous like that of transformers' attention functions, and None instead of
    attention weights.
    """
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    if key_dim == value_dim:
        attended, _ = attention_forward(module, query, key, value, attention_mask, **options)
        return attended.contiguous(), None
    if options.get("scaling") is None:
        options["scaling"] = key_dim**-0.5
    query, key, value = (pad(heads, (0, max(key_dim, value_dim) - heads.shape[-1])) for heads in (query, key, value))
    attended, _ = attention_forward(module, query, key, value, attention_mask, **options)
    return attended[..., :value_dim].contiguous(), None
