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
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig, EngineStartError
from engine.device import free_bytes
from engine.paged_attention import ATTENTION_NAME, register_attention

_LAYER_TYPES = {"full_attention", "sliding_attention"}
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
        raise EngineStartError(f"model {config.model}: {_first_line(error)}") from error
    if reason := _reason_against(hf_config):
        raise unsupported(hf_config, reason)
    return hf_config


def load_model(config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Weights in `dtype` on `device`, attention left to whom `bind` names."""
    register_attention()
    transformers_logging.disable_progress_bar()  # a worker's stderr is a log
    options = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    try:
        _check_weights_fit(hf_config, dtype, device)
        if config.load_format == "dummy":
            model = _random_model(hf_config, config.seed, device, options)
        else:
            path = str(Path(config.model).expanduser())
            model = AutoModelForCausalLM.from_pretrained(path, config=hf_config, **options).to(device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EngineStartError(f"not enough memory for the weights of {config.model}") from error
    except EngineStartError:
        raise
    except Exception as error:  # a config.json can break modeling code in any way
        raise EngineStartError(f"model {config.model}: {_first_line(error)}") from error
    missing = {"position_ids", "logits_to_keep"} - inspect.signature(model.forward).parameters.keys()
    if missing:
        raise unsupported(hf_config, f"its forward takes no {' and no '.join(sorted(missing))}")
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
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # Beyond this length such a model turns all positions by other angles: a sequence's would then depend
        # on who else is in the step.
        if parameters.get("rope_type") in ("longrope", "dynamic"):
            limits.append(parameters.get("original_max_position_embeddings"))
    known = [int(limit) for limit in limits if limit]
    return min(known, default=None)


def eos_token_ids(model: Any, hf_config: Any) -> tuple[int, ...]:
    """All ids that end a sequence: one, several or none."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = getattr(hf_config.get_text_config(decoder=True), "eos_token_id", None)
    if declared is None:
        return ()
    return (declared,) if isinstance(declared, int) else tuple(declared)


def _reason_against(hf_config: Any) -> str | None:
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers knows no causal language model of this kind"
    if getattr(hf_config, "is_encoder_decoder", False):
        return "it has an encoder"
    text = hf_config.get_text_config(decoder=True)
    if other := set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES:
        return f"it has layers of the kind {', '.join(sorted(other))}"
    if getattr(text, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)].is_backend_compatible():
        return "its attention does not go through transformers' AttentionInterface"
    return None


def _check_weights_fit(hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    needed = sum(p.numel() * p.element_size() for p in skeleton.parameters())
    free = free_bytes(device)
    if needed > free:
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


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
