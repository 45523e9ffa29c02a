"""Finds out what a model's attention layers need by watching forward passes of it, and refuses by name what this
engine would get wrong.

Configurations say it in as many ways as there are architectures; what the modeling code asks of attention, and
whether it keeps the rows of a packed step apart, is the truth. Knows what our attention can do; not how it does it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from engine.config import EngineStartError
from engine.native.attention.paged import ATTENTION_NAME, bind
from engine.native.kv.cache import LayerShape
from engine.native.model.head_padding import attention_forward_padded
from engine.native.model.loader import context_limit, first_line, forward, unsupported

_PROBE_NAME = "tidegate_probe"
_LONGEST_WINDOW = 1 << 20  # a longer one is none
# What layers may hand to attention. The first line is heeded, the second changes nothing.
_KNOWN_OPTIONS = {"attention_mask", "scaling", "softcap", "s_aux", "is_causal", "sliding_window"}
_KNOWN_OPTIONS |= {
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "logits_to_keep",
}
_TOKENS = (3, 5, 2, 6, 4, 1)
_POSITIONS = (0, 4, 1, 6, 2, 7)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """`window`: the tokens that a row sees, itself included; None: all."""

    shape: LayerShape
    window: int | None


def probe_layers(
    model: Any, hf_config: Any, num_tokens: int, num_rows: int, max_model_len: int | None = None
) -> list[LayerSpec]:
    """The layers of `model`, in order. On CUDA the pass's peak of memory is that of the largest step, KV aside.
    Raises `EngineStartError` for a model that our attention would get wrong within `max_model_len` tokens, or its
    whole context."""
    context = context_limit(hf_config) or _LONGEST_WINDOW
    try:
        with torch.inference_mode():
            layers = _record_layers(model, context, num_tokens, num_rows)
            _check_rows_independent(model)
            _check_cache_agrees(hf_config, layers, min(max_model_len or context, context))
    except _UnsupportedAttention as error:
        raise unsupported(hf_config, str(error)) from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EngineStartError("not enough memory for the largest step: lower max_step_tokens") from error
    except Exception as error:  # modeling code that was never meant for packed rows breaks in any way
        raise unsupported(hf_config, f"a packed step fails in it: {first_line(error)}") from error
    num_layers = hf_config.get_text_config(decoder=True).num_hidden_layers
    if sorted(layers) != list(range(num_layers)):
        raise unsupported(
            hf_config, f"{len(layers)} of its {num_layers} layers go through transformers' AttentionInterface"
        )
    return [layers[i] for i in range(num_layers)]


class _UnsupportedAttention(Exception):
    pass


def _record_layers(model: Any, context: int, num_tokens: int, num_rows: int) -> dict[int, LayerSpec]:
    """The layers by index, from one pass whose masks are descriptions of what a context of that many tokens hides."""
    masks = _MaskDescriptions(min(context, _LONGEST_WINDOW))
    AttentionInterface.register(_PROBE_NAME, attention_forward_padded)
    AttentionMaskInterface.register(_PROBE_NAME, masks.describe)
    probe = _Probe(masks)
    bind(model, probe)
    device = next(model.parameters()).device
    positions = torch.arange(num_tokens, device=device)[None]
    model.set_attn_implementation(_PROBE_NAME)
    try:
        rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        forward(model, torch.zeros_like(positions), positions, rows)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return probe.layers


class _Probe:
    """Stands in for attention: notes what is asked for, and answers zeros."""

    def __init__(self, masks: "_MaskDescriptions") -> None:
        self.layers: dict[int, LayerSpec] = {}
        self._masks = masks

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        layer_idx = getattr(module, "layer_idx", None)
        if layer_idx is None or layer_idx in self.layers:
            raise _UnsupportedAttention("it has more attention than one a layer")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise _UnsupportedAttention("its attention is not causal")
        if options.get("position_bias") is not None:
            raise _UnsupportedAttention("its attention has biases of its own")
        if unknown := [name for name in options if name not in _KNOWN_OPTIONS and options[name] is not None]:
            raise _UnsupportedAttention(f"its attention wants {', '.join(unknown)}")
        if key.shape[2] != query.shape[2]:
            raise _UnsupportedAttention("its keys are not those of the tokens of the step")
        window = self._masks.window(options.get("attention_mask"))
        self.layers[layer_idx] = LayerSpec(LayerShape(key.shape[1], key.shape[3]), window)
        return torch.zeros_like(query).transpose(1, 2)


class _MaskDescriptions:
    """Stand in for the masks that transformers would make: what two tokens of a long context see, of which a layer's
    probe reads the window."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._observers = (context - 1, context * 7 // 8)

    def describe(self, *_: Any, mask_function: Callable[..., Tensor], device: torch.device, **__: Any) -> Tensor:
        """(1, 1, 2, context) bools."""
        positions = torch.arange(self._context, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        views = [mask_function(zero, zero, positions[observer], positions) for observer in self._observers]
        return torch.stack([torch.as_tensor(v, device=device).expand(positions.shape) for v in views])[None, None]

    def window(self, mask: Tensor | None) -> int | None:
        if mask is None:  # the modeling code leaves causality to attention
            return None
        if mask.dtype is not torch.bool or mask.shape[1:] != (1, len(self._observers), self._context):
            raise _UnsupportedAttention("its attention has biases of its own")
        num_visible = int(mask[0, 0, 0].sum())
        for observer, view in zip(self._observers, mask[0, 0], strict=True):
            distances = observer - torch.arange(self._context, device=mask.device)
            if view[distances < 0].any():
                raise _UnsupportedAttention("its attention is not causal")
            if not torch.equal(view, (distances >= 0) & (distances < num_visible)):
                raise _UnsupportedAttention("its attention is neither causal nor a sliding window")
        return None if num_visible == self._context else num_visible


def _check_rows_independent(model: Any) -> None:
    """A row must come out the same in any company and at any place of the step: nothing but attention may look at
    other rows (convolutions, recurrences), and its position is the one it was given, not its place.

    Every other row is computed in two steps, in reversed order, the rows between them replaced. Rows are compared by
    the queries and keys of each layer and by their logits; the median row counts, since a near tie of a router may
    send one of them another way.
    """
    device = next(model.parameters()).device
    token_ids = torch.tensor([_TOKENS], device=device)
    positions = torch.tensor([_POSITIONS], device=device)
    other_ids, other_positions = token_ids.flip(1), positions.flip(1)
    other_ids[:, ::2], other_positions[:, ::2] = 7, 3
    first = _row_results(model, token_ids, positions)
    second = _row_results(model, other_ids, other_positions)
    for rows, flipped in zip(first, second, strict=True):
        kept, again = rows[::2].float(), flipped.flip(0)[::2].float()
        error = (kept - again).norm(dim=1) / kept.norm(dim=1)
        if error.nan_to_num().median() > (1e-3 if rows.dtype is torch.float32 else 0.1):
            raise _UnsupportedAttention("it mixes the tokens of a step in other ways than by attention")


def _check_cache_agrees(hf_config: Any, layers: dict[int, LayerSpec], context: int) -> None:
    """transformers' own cache may keep a shorter window than the masks show (a stray setting, mostly): what such a
    model generates beyond it depends on how its prompt was computed, and there is nothing to agree with."""
    for cached, layer in zip(DynamicCache(config=hf_config).layers, layers.values(), strict=False):
        kept = getattr(cached, "sliding_window", None)
        if kept is not None and kept < min(layer.window or context, context):
            raise _UnsupportedAttention(
                f"its masks show more than the {kept} tokens that its cache keeps; with max_model_len {kept} it is"
            )


def _row_results(model: Any, token_ids: Tensor, positions: Tensor) -> list[Tensor]:
    """What the model made of each row: (rows, numbers) for queries and keys of every layer, and for the logits."""
    noted: list[Tensor] = []

    def attend_to_oneself(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        noted.extend(heads[0].transpose(0, 1).flatten(1) for heads in (query, key))
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    bind(model, attend_to_oneself)
    logits = forward(model, token_ids, positions, torch.arange(token_ids.shape[1], device=token_ids.device))
    return [*noted, logits]
