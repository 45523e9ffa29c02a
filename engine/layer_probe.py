"""Finds out what a model's attention layers need by watching one forward pass of it.

Configurations say it in as many ways as there are architectures; what the modeling code asks of attention is
the truth. Knows what our attention cannot do, and refuses such a model by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from engine.kv_cache import LayerShape
from engine.model_loader import forward, unsupported
from engine.paged_attention import ATTENTION_NAME, attention_forward, bind

_PROBE_NAME = "tidegate_probe"
_LONGEST_WINDOW = 1 << 20  # a longer one is none


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """`window`: the tokens that a row sees, itself included; None: all."""

    shape: LayerShape
    window: int | None


def probe_layers(model: Any, hf_config: Any, num_tokens: int, num_rows: int) -> list[LayerSpec]:
    """The layers of `model`, in order. On CUDA the pass's peak of memory is that of the largest step, KV aside.
    Raises `EngineStartError` for a model that our attention would get wrong."""
    AttentionInterface.register(_PROBE_NAME, attention_forward)
    AttentionMaskInterface.register(_PROBE_NAME, _describe_mask)
    probe = _Probe()
    bind(model, probe)
    device = next(model.parameters()).device
    positions = torch.arange(num_tokens, device=device)[None]
    rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
    model.set_attn_implementation(_PROBE_NAME)
    try:
        with torch.inference_mode():
            forward(model, torch.zeros_like(positions), positions, rows)
    except _UnsupportedAttention as error:
        raise unsupported(hf_config, str(error)) from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    num_layers = hf_config.get_text_config(decoder=True).num_hidden_layers
    if sorted(probe.layers) != list(range(num_layers)):
        raise unsupported(
            hf_config, f"{len(probe.layers)} of its {num_layers} layers go through transformers' AttentionInterface"
        )
    return [probe.layers[i] for i in range(num_layers)]


class _UnsupportedAttention(Exception):
    pass


class _Probe:
    """Stands in for attention: notes what is asked for, and answers zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerSpec] = {}

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        layer_idx = getattr(module, "layer_idx", None)
        if layer_idx is None or layer_idx in self.layers:
            raise _UnsupportedAttention("it has more attention than one a layer")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise _UnsupportedAttention("its attention is not causal")
        if options.get("position_bias") is not None:
            raise _UnsupportedAttention("its attention has biases of its own")
        if key.shape != value.shape:
            raise _UnsupportedAttention("its keys and values differ in shape")
        window = _window(options.get("attention_mask"))
        self.layers[layer_idx] = LayerSpec(LayerShape(key.shape[1], key.shape[3]), window)
        return torch.zeros_like(query).transpose(1, 2)


def _describe_mask(*_: Any, mask_function: Callable[..., Tensor], device: torch.device, **__: Any) -> Tensor:
    """Stands in for the mask that transformers would make: the row of a far token, of which a layer's probe
    reads the window. (1, 1, 1, _LONGEST_WINDOW + 1) bools."""
    positions = torch.arange(_LONGEST_WINDOW + 1, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    visible = mask_function(zero, zero, positions[-1], positions)
    return torch.as_tensor(visible, device=device).expand(positions.shape)[None, None, None]


def _window(mask: Tensor | None) -> int | None:
    if mask is None:  # the modeling code leaves causality to attention
        return None
    if mask.shape[-1] != _LONGEST_WINDOW + 1:
        raise _UnsupportedAttention("its attention has biases of its own")
    row = mask.flatten()
    num_visible = int(row.sum())
    if not row[len(row) - num_visible :].all():
        raise _UnsupportedAttention("its attention is neither causal nor a sliding window")
    return None if num_visible == len(row) else num_visible
