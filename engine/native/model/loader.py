"""A transformers model, ready to be driven: loaded or made up, checked, and told to use our attention.

Knows transformers' configurations and what in them this engine cannot do; not steps or KV memory. Everything
that can be wrong with a model ends here, as an `EngineStartError` that names it.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig, EngineStartError
from engine.native.attention.paged import ATTENTION_NAME
from engine.native.device import free_bytes
from engine.native.model.head_padding import attention_forward_padded
from engine.native.model.weights import quantization_method, read_weights, stored_bytes

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_GIB = 1 << 30


def load_config(config: EngineConfig) -> Any:
    """The model's transformers configuration, if this engine can run its architecture."""
    path = Path(config.model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EngineStartError(f"model directory {path} has no config.json")
    elif path.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") != 1:
        raise EngineStartError(f"model directory {path} does not exist")
    try:
        hf_config = AutoConfig.from_pretrained(str(path) if path.is_dir() else config.model)
    except (OSError, ValueError, KeyError) as error:
        raise EngineStartError(f"model {config.model}: {first_line(error)}") from error
    if reason := _unsupported_reason(hf_config):
        raise unsupported(hf_config, reason)
    return hf_config


def load_model(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Weights in `dtype` on `device`, attention left to whom `bind` names."""
    # No mask goes under that name, so modeling code makes none: rows know their contexts, layers their windows.
    AttentionInterface.register(ATTENTION_NAME, attention_forward_padded)
    transformers_logging.disable_progress_bar()  # a worker's stderr is a log
    options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    try:
        if config.load_format == "dummy":
            _check_fits(_plain_bytes(hf_config, dtype), device)
            model = _random_model(hf_config, config.seed, device, options)
        else:
            path = str(Path(config.model).expanduser())
            is_plain = quantization_method(hf_config) is None
            _check_fits(_plain_bytes(hf_config, dtype) if is_plain else stored_bytes(path), device)
            model = read_weights(path, hf_config, device, options)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EngineStartError(f"not enough memory for the weights of {config.model}") from error
    except EngineStartError:
        raise
    except Exception as error:  # a config.json can break modeling code in any way
        raise EngineStartError(f"model {config.model}: {first_line(error)}") from error
    module: nn.Module = model.eval().requires_grad_(False)
    return module


def forward(model: nn.Module, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Logits (len(rows), vocab) after the given rows of a packed step: (1, T) token ids and positions."""
    output = model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
    logits: Tensor = output.logits[0]
    return logits


def context_limit(hf_config: Any) -> int | None:
    """Tokens that the model can attend over; None where the configuration does not say."""
    text = hf_config.get_text_config(decoder=True)
    limits = [getattr(text, "max_position_embeddings", None)]
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        limits.append(text.attention_chunk_size)  # the first chunk attends as every other model does
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # Beyond this length such a model turns all positions by other angles: a sequence's would then depend
        # on who else is in the step.
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            limits.append(parameters.get("original_max_position_embeddings"))
    known = [int(limit) for limit in limits if limit]
    return min(known, default=None)


def is_quantised(model: Any) -> bool:
    """Whether its weights are of a quantisation package's making, and only its own operators take them."""
    return getattr(model, "hf_quantizer", None) is not None


def eos_token_ids(model: Any, hf_config: Any) -> tuple[int, ...]:
    """All ids that end a sequence: one, several or none."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = getattr(hf_config.get_text_config(decoder=True), "eos_token_id", None)
    if declared is None:
        return ()
    return (declared,) if isinstance(declared, int) else tuple(declared)


def _unsupported_reason(hf_config: Any) -> str | None:
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers knows no causal language model of this kind"
    if getattr(hf_config, "is_encoder_decoder", False):
        return "it has an encoder"
    text = hf_config.get_text_config(decoder=True)
    if other := set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES:
        return f"it has layers of the kind {', '.join(sorted(other))}"
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if not architecture.is_backend_compatible():
        return "its attention does not go through transformers' AttentionInterface"
    if missing := {"position_ids", "logits_to_keep"} - inspect.signature(architecture.forward).parameters.keys():
        return f"its forward takes no {' and no '.join(sorted(missing))}"
    return None


def _plain_bytes(hf_config: Any, dtype: torch.dtype) -> int:
    """What all weights take in `dtype`."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    return sum(p.numel() * p.element_size() for p in skeleton.parameters())


def _check_fits(needed: int | None, device: torch.device) -> None:
    free = free_bytes(device)
    if needed is not None and needed > free:
        raise EngineStartError(
            f"not enough memory: the weights take {needed / _GIB:.1f} GiB and {device} has {free / _GIB:.1f} GiB free"
        )


def _random_model(hf_config: Any, seed: int, device: torch.device, options: dict[str, Any]) -> Any:
    """Made on its device in its dtype, so that nothing larger ever exists; the same for the same seed."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(hf_config, **options)


def unsupported(hf_config: Any, reason: str) -> EngineStartError:
    names = getattr(hf_config, "architectures", None) or [type(hf_config).__name__]
    return EngineStartError(f"architecture {names[0]} is not supported: {reason}")


def first_line(error: Exception) -> str:
    """What an exception says, in a line."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
