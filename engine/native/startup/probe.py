"""Run a model once to find out what its attention layers need, and refuse models that this engine cannot run correctly.

Each architecture describes its layers in its own configuration fields. The probe therefore observes the modeling code:
which arguments it passes to attention, and whether rows of a packed step influence each other outside attention. Knows
which models the engine's attention supports; does not know how attention is computed.
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
from engine.native.attention.paged import ATTENTION_NAME, attention_forward, bind
from engine.native.kv.cache import LayerShape
from engine.native.model.loader import context_limit, first_line, forward, unsupported

_PROBE_NAME = "tidegate_probe"
_MAX_WINDOW = 1 << 20  # tokens; a longer window counts as no window
# Arguments that layers may pass to attention. The engine uses the first group; the second does not change the result.
_KNOWN_OPTIONS = {"attention_mask", "scaling", "softcap", "s_aux", "is_causal", "sliding_window"}
_KNOWN_OPTIONS |= {
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "logits_to_keep",
}
# Token ids and positions of the step that checks whether rows are independent.
_TOKENS = (3, 5, 2, 6, 4, 1)
_POSITIONS = (0, 4, 1, 6, 2, 7)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties of a layer that the KV cache and attention need."""

    shape: LayerShape
    window: int | None  # number of tokens that a row attends to, including itself; None means all


def probe_layers(
    model: Any, hf_config: Any, num_tokens: int, num_rows: int, max_model_len: int | None = None
) -> list[LayerSpec]:
    """Return the specifications of the layers of `model`, in order.

    The forward pass of the probe has `num_tokens` rows and computes logits for `num_rows` of them. On CUDA, the memory
    peak of this pass is therefore the memory, apart from KV, that the engine's largest step needs.

    Raises `EngineStartError` if the model's results would be wrong within `max_model_len` tokens, or within its whole
    context if `max_model_len` is None.
    """
    context = context_limit(hf_config) or _MAX_WINDOW
    try:
        with torch.inference_mode():
            layers = _record_layers(model, context, num_tokens, num_rows)
            _check_rows_independent(model)
            _check_cache_agrees(hf_config, layers, min(max_model_len or context, context))
    except _UnsupportedAttention as error:
        raise unsupported(hf_config, str(error)) from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EngineStartError("not enough memory for the largest step: lower max_step_tokens") from error
    except Exception as error:  # modeling code not written for packed rows may fail in any way
        raise unsupported(hf_config, f"its forward pass fails on a packed step: {first_line(error)}") from error
    num_layers = hf_config.get_text_config(decoder=True).num_hidden_layers
    if sorted(layers) != list(range(num_layers)):
        raise unsupported(hf_config, f"{len(layers)} of its {num_layers} layers use transformers' AttentionInterface")
    return [layers[i] for i in range(num_layers)]


class _UnsupportedAttention(Exception):
    """Raised if the engine's attention does not support the model; the message says why."""


def _record_layers(model: Any, context: int, num_tokens: int, num_rows: int) -> dict[int, LayerSpec]:
    """Run one forward pass whose masks describe a context of `context` tokens; return the layers by index."""
    masks = _MaskDescriptions(min(context, _MAX_WINDOW))
    AttentionInterface.register(_PROBE_NAME, attention_forward)
    AttentionMaskInterface.register(_PROBE_NAME, masks.describe)
    probe = _Probe(masks)
    bind(model, probe)
    device = next(model.parameters()).device
    positions = torch.arange(num_tokens, device=device)[None] % context  # learned positions end with the context
    model.set_attn_implementation(_PROBE_NAME)
    try:
        rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        forward(model, torch.zeros_like(positions), positions, rows)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return probe.layers


class _Probe:
    """A replacement for attention that records each layer's shape and window, and returns zeros."""

    def __init__(self, masks: "_MaskDescriptions") -> None:
        self.layers: dict[int, LayerSpec] = {}
        self._masks = masks

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Record the layer of `module` and return zeros; shapes are those of `LayerAttention`.

        Raises `_UnsupportedAttention` if the engine's attention does not support the layer.
        """
        layer_idx = getattr(module, "layer_idx", None)
        if layer_idx is None or layer_idx in self.layers:
            raise _UnsupportedAttention("it has more than one attention per layer")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise _UnsupportedAttention("its attention is not causal")
        if options.get("position_bias") is not None:
            raise _UnsupportedAttention("its attention has biases of its own")
        if unknown := [name for name in options if name not in _KNOWN_OPTIONS and options[name] is not None]:
            raise _UnsupportedAttention(f"its attention needs {', '.join(unknown)}")
        if key.shape[2] != query.shape[2]:
            raise _UnsupportedAttention("its keys are not computed from the tokens of the step")
        window = self._masks.window(options.get("attention_mask"))
        self.layers[layer_idx] = LayerSpec(LayerShape(key.shape[1], key.shape[3]), window)
        return torch.zeros_like(query).transpose(1, 2)


class _MaskDescriptions:
    """A replacement for transformers' attention masks: only the mask rows of two tokens in a long context.

    The probe derives a layer's window from these two rows.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._observers = (context - 1, context * 7 // 8)

    def describe(self, *_: Any, mask_function: Callable[..., Tensor], device: torch.device, **__: Any) -> Tensor:
        """Return the mask rows of two tokens (the observers), (1, 1, 2, context) bool.

        An item is true if the observer attends to the token at that position.
        """
        positions = torch.arange(self._context, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        views = [mask_function(zero, zero, positions[observer], positions) for observer in self._observers]
        return torch.stack([torch.as_tensor(v, device=device).expand(positions.shape) for v in views])[None, None]

    def window(self, mask: Tensor | None) -> int | None:
        """Return the window in tokens that `mask` (1, 1, 2, context) shows; None for full causal attention.

        Raises `_UnsupportedAttention` if the mask is neither causal nor a sliding window.
        """
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
    """Raises `_UnsupportedAttention` if a row's result depends on other rows or on its place in the step.

    Only attention may read other rows, but convolutions and recurrences read other rows, too. A model must also use the
    given position of a row, not its place in the step. The check computes the rows 0, 2 and 4 in two steps. The second
    step has the reverse order of rows, and other tokens in the rows 1, 3 and 5. The check compares the queries and keys
    of each layer, and the logits. It uses the median of the rows' errors, since a near tie in a router may send one of
    the rows to another expert.
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
    """Raises `_UnsupportedAttention` if transformers' own cache keeps a shorter window than the masks show.

    The cause is mostly a mistake in the model's configuration. Beyond the cache's window, the model's tokens depend on
    how the prompt was split into chunks, so no correct result is defined.
    """
    for cached, layer in zip(DynamicCache(config=hf_config).layers, layers.values(), strict=False):
        kept = getattr(cached, "sliding_window", None)
        if kept is not None and kept < min(layer.window or context, context):
            raise _UnsupportedAttention(
                f"its masks show more than the {kept} tokens that its cache keeps; set max_model_len to {kept}"
            )


def _row_results(model: Any, token_ids: Tensor, positions: Tensor) -> list[Tensor]:
    """Return the queries and keys of every layer, (rows, numbers) each, then the logits (rows, vocab).

    The model's attention is replaced: each row attends to itself only.
    """
    noted: list[Tensor] = []

    def attend_to_oneself(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        noted.extend(heads[0].transpose(0, 1).flatten(1) for heads in (query, key))
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    bind(model, attend_to_oneself)
    logits = forward(model, token_ids, positions, torch.arange(token_ids.shape[1], device=token_ids.device))
    return [*noted, logits]
