"""Load a model for the engine: its weights, quantised if wanted, and what a probe says of its layers.

Knows the options that concern loading; does not know kernels or KV memory.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import GenerationConfig

from engine import gguf
from engine.config import EngineConfig, EngineStartError
from engine.native.cpu.build import load_library
from engine.native.cpu.products import Products
from engine.native.device import choose_device, choose_dtype
from engine.native.kv.cache import LayerShape
from engine.native.kv.sizing import wanted_model_len
from engine.native.model.loader import check_fits, context_limit, is_on_hub, is_quantised, load_config, load_model
from engine.native.model.quantization import quantize
from engine.native.model.weights import CannotKeepError, quantization_method
from engine.native.startup.probe import LayerSpec, probe_layers
from engine.progress import NO_PROGRESS, Phase, Progress

_SMALL_MODEL = 10_000_000  # a model with fewer parameters is small; see `_set_threads`


@dataclass(frozen=True, slots=True)
class Loaded:
    """The loaded model, with its device, dtype, configuration and memory needs."""

    device: torch.device
    dtype: torch.dtype
    hf_config: Any
    wanted_len: int  # maximum tokens in a sequence, if the KV cache has room for them
    model: nn.Module
    specs: list[LayerSpec]  # one for each layer: the properties that attention needs
    step_bytes: int  # device memory that the largest step needs beyond weights and KV; 0 on a CPU

    @property
    def layers(self) -> list[LayerShape]:
        return [spec.shape for spec in self.specs]


def dtype_of(config: EngineConfig, device: torch.device, progress: Progress = NO_PROGRESS) -> torch.dtype:
    """Return the dtype of the model's weights and activations. Raises `EngineStartError` if its name is unknown."""
    has_products = config.dtype == "auto" and _has_products(config, torch.bfloat16, device, progress)
    return choose_dtype(config.dtype, device, has_products=has_products)


def _has_products(config: EngineConfig, dtype: torch.dtype, device: torch.device, progress: Progress) -> bool:
    return device.type == "cpu" and config.optimize and Products.available(load_library(progress), dtype)


def load(config: EngineConfig, progress: Progress) -> Loaded:
    device = choose_device(config.device)
    dtype = dtype_of(config, device, progress)
    file = _file_to_keep(config, dtype, device, progress)
    # The hub's client shows its downloads itself.
    with progress.phase("loading the model", draws_itself=is_on_hub(config)) as phase:
        hf_config = load_config(config)
        wanted_len = wanted_model_len(config, context_limit(hf_config))
        model = _load_weights(config, hf_config, dtype, device, phase, file)
    _set_threads(config, model)
    with progress.phase("probing the model"):
        specs, step_bytes = _measure(model, hf_config, config, device)
    return Loaded(device, dtype, hf_config, wanted_len, model, specs, step_bytes)


def _load_weights(
    config: EngineConfig,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    phase: Phase,
    file: Path | None,
) -> nn.Module:
    """Return the loaded model, with the blocks of the GGUF `file` if there is one.

    With `--quantize`, only the quantised weights come to `device`.
    """
    if file is not None:
        try:
            check_fits(file.stat().st_size, device)
            return load_model(config, hf_config, dtype, device, phase, partial(_read_blocks, file, config.model))
        except CannotKeepError as error:
            _unpack(file, str(error))
    if config.quantize is None:
        return load_model(config, hf_config, dtype, device, phase)
    model = load_model(config, hf_config, dtype, torch.device("cpu"), phase)
    if is_quantised(model):
        method = quantization_method(hf_config)
        raise EngineStartError(f"the weights of {config.model} are quantised already, with {method}: drop --quantize")
    linears, experts = quantize(model, config.quantize, with_experts=device.type == "cpu")
    log = structlog.get_logger(__name__)
    log.info("weights quantised", kind=config.quantize, linears=linears, layers_with_experts=experts)
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise EngineStartError(f"not enough memory for the weights of {config.model}") from error


def _file_to_keep(config: EngineConfig, dtype: torch.dtype, device: torch.device, progress: Progress) -> Path | None:
    """Return the GGUF file whose blocks stay in memory as they are; None if the model's weights are in its directory.

    A file whose blocks would be slower than unpacked weights is unpacked to its directory.
    """
    file = gguf.source_of(config.model) if config.load_format == "auto" else None
    if file is None:
        return None
    if config.quantize is not None:
        reason = f"they are rounded to {config.quantize}"
    elif not _has_products(config, dtype, device, progress):
        reason = f"there are no products with them for {str(dtype).removeprefix('torch.')} on this device"
    else:
        return file
    _unpack(file, reason)
    return None


def _read_blocks(file: Path, directory: str, hf_config: Any, options: dict[str, Any], phase: Phase) -> Any:
    from engine.native.model.gguf_model import load_kept  # imports a package that only these files need

    model: Any = load_kept(file, Path(directory), hf_config, options, phase)
    model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _unpack(file: Path, reason: str) -> None:
    structlog.get_logger(__name__).info("the blocks of the GGUF file do not stay as they are", reason=reason)
    gguf.unpacked(file, with_weights=True)


def _set_threads(config: EngineConfig, model: nn.Module) -> None:
    """Set the number of CPU threads of an operator: the configured number, or 1 for a small model.

    For a larger model without a configured number, torch's default stays. The operators of a small model are too short
    to be divided among threads: a second thread makes a step of the demo model only 1.2 times as fast, and occupies the
    core that the gateway needs.
    """
    is_small = sum(p.numel() for p in model.parameters()) < _SMALL_MODEL
    if config.num_threads is not None or is_small:
        torch.set_num_threads(config.num_threads or 1)


def _measure(
    model: nn.Module, hf_config: Any, config: EngineConfig, device: torch.device
) -> tuple[list[LayerSpec], int]:
    """Return for each layer the properties that attention needs, and the memory of the largest step in bytes.

    On a CPU the number of bytes is 0: KV gets only a part of the free memory, and the rest is ample for a step.
    """
    if device.type == "cpu":
        return probe_layers(model, hf_config, 1, 1, config.max_model_len), 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    num_rows = min(config.max_num_seqs, config.max_step_tokens)
    specs = probe_layers(model, hf_config, config.max_step_tokens, num_rows, config.max_model_len)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return specs, peak
