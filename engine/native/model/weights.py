"""Read the weights of a transformers directory once, and check that all weights exist and have the right shape.

Knows files, their headers and quantisation packages; does not know architectures or attention. On a CPU, weights that
have the wanted dtype on disk stay memory-mapped. All other weights are converted one tensor at a time, so that there is
never a second copy of the model.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import is_accelerate_available
from transformers.utils import logging as transformers_logging

from engine.config import EngineStartError

_INDEX = "model.safetensors.index.json"
_WAY_OUT = "or use --engine vllm, or the model's plain weights with --quantize int8"
_MAX_NAMED = 3  # a message lists the names of at most this many weights


class CannotKeepError(EngineStartError):
    """The error of a GGUF file whose blocks cannot stay as they are. The message says why."""


def read_weights(model: str, hf_config: Any, device: torch.device, options: dict[str, Any]) -> nn.Module:
    """Return the model with the weights of `model`, a directory or hub id, on `device`.

    `options` are passed to `from_pretrained`. Raises `EngineStartError` if weights are missing, damaged or of the wrong
    shape, or if their quantisation needs a package or a device that is missing.
    """
    _check_files(Path(model))
    method = quantization_method(hf_config)
    if device.type == "cuda" and is_accelerate_available():
        options = {**options, "device_map": {"": device}}  # loads directly to the device, without a copy in host memory
    try:
        with without_transformers_log():
            loaded, report = AutoModelForCausalLM.from_pretrained(
                model, config=hf_config, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # each quantisation package tells in its own way what it lacks
        if method is None:
            raise
        raise EngineStartError(f"model {model} is quantised with {method}: {_one_line(error)} ({_WAY_OUT})") from error
    check_report(model, report)
    if method is not None and getattr(loaded, "hf_quantizer", None) is None:
        loaded = loaded.to(options["dtype"])  # unpacked to plain weights, of which some keep the checkpoint's dtype
    if "device_map" not in options and device.type != "cpu":
        loaded = loaded.to(device)
    module: nn.Module = loaded
    return module


def quantization_method(hf_config: Any) -> str | None:
    """Return the quantisation method of the weights; None if the weights are not quantised.

    Raises `EngineStartError` if transformers does not know the method: it would treat the weights as not quantised.
    """
    declared = getattr(hf_config, "quantization_config", None)
    declared = declared or getattr(hf_config.get_text_config(decoder=True), "quantization_config", None)
    if not declared:
        return None
    settings = declared if isinstance(declared, dict) else declared.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method == "bitsandbytes" or settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise EngineStartError(
            f"the weights are quantised with {method}, which transformers does not know: name another model, {_WAY_OUT}"
        )
    return method


def stored_bytes(model: str) -> int | None:
    """Return the size of the weights on disk in bytes; None for a hub id."""
    directory = Path(model)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors")) if directory.is_dir() else None


def _check_files(directory: Path) -> None:
    """Raises `EngineStartError` if a safetensors file is missing or damaged.

    Opening a file reads its header and compares the file's length with the header.
    """
    if not directory.is_dir():
        return
    names: Iterable[str] = [path.name for path in directory.glob("model*.safetensors")]
    if (directory / _INDEX).is_file():
        names = _indexed_files(directory / _INDEX)
    for name in names:
        try:
            with safe_open(directory / name, framework="pt"):
                pass
        except FileNotFoundError as error:
            raise EngineStartError(f"model {directory}: {_INDEX} names {name}, which does not exist") from error
        except (SafetensorError, OSError) as error:
            raise EngineStartError(f"model {directory}: {name} is damaged: {_one_line(error)}") from error


def _indexed_files(index: Path) -> list[str]:
    """Return the names of the files that the index lists. Raises `EngineStartError` if the index is not valid."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineStartError(f"model {index.parent}: {index.name} is not a valid index of weights") from error


def check_report(model: str, report: dict[str, Any]) -> None:
    """Raises `EngineStartError` if weights are missing or have the wrong shape.

    transformers itself would fill such weights with random numbers. Unused weights are only logged as a warning.
    """
    if missing := report["missing_keys"]:
        raise EngineStartError(f"model {model} lacks the weights {_list_names(missing)}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise EngineStartError(
            f"model {model}: {len(mismatched)} weights have another shape than the config says, "
            f"the first {name} with {tuple(stored)} instead of {tuple(wanted)}"
        )
    if unexpected := report["unexpected_keys"]:
        structlog.get_logger(__name__).warning(
            "unused weights in the checkpoint", model=model, names=_list_names(unexpected)
        )


def _list_names(names: Iterable[str]) -> str:
    """Return a text with the first names and the number of further names."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMED} more" if len(ordered) > _MAX_NAMED else ""
    return ", ".join(ordered[:_MAX_NAMED]) + more


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def without_transformers_log() -> Iterator[None]:
    """Silence transformers' table of weights that do not match the model; `check_report` reports these weights."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
