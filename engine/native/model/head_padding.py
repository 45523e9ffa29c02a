"""Heads whose values are narrower (or wider) than their keys, made equal for paged attention.

Latent attention (DeepSeek's, and those after it) and a few others have such heads. KV memory has one head size a
layer; zeros in a key or query add nothing to a score, and those in a value come out as zeros that are cut off.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from engine.native.attention.paged import attention_forward


def attention_forward_padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """`attention_forward` for keys and values of any head size: (1, T, heads, value's head_dim) out, contiguous, as
    transformers' own attention functions answer."""
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    if key_dim == value_dim:
        attended, _ = attention_forward(module, query, key, value, attention_mask, **options)
        return attended.contiguous(), None
    if options.get("scaling") is None:
        options["scaling"] = key_dim**-0.5
    query, key, value = (pad(heads, (0, max(key_dim, value_dim) - heads.shape[-1])) for heads in (query, key, value))
    attended, _ = attention_forward(module, query, key, value, attention_mask, **options)
    return attended[..., :value_dim].contiguous(), None
