"""Load a model for the engine: its weights, quantised if wanted, and what a probe says of its layers.

Knows the options that concern loading; does not know kernels or KV memory.
"""

from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import nn

from engine.config import EngineConfig, EngineStartError
from engine.native.device import choose_device, choose_dtype
from engine.native.kv.cache import LayerShape
from engine.native.kv.sizing import wanted_model_len
from engine.native.model.loader import context_limit, is_on_hub, is_quantised, load_config, load_model
from engine.native.model.probe import LayerSpec, probe_layers
from engine.native.model.quantized import quantize
from engine.native.model.weights import quantization_method
from engine.progress import Phase, Progress

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


def load(config: EngineConfig, progress: Progress) -> Loaded:
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    # The hub's client shows its downloads itself.
    with progress.phase("loading the model", draws_itself=is_on_hub(config)) as phase:
        hf_config = load_config(config)
        wanted_len = wanted_model_len(config, context_limit(hf_config))
        model = _load_weights(config, hf_config, dtype, device, phase)
    _set_threads(config, model)
    with progress.phase("probing the model"):
        specs, step_bytes = _measure(model, hf_config, config, device)
    return Loaded(device, dtype, hf_config, wanted_len, model, specs, step_bytes)


def _load_weights(
    config: EngineConfig, hf_config: Any, dtype: torch.dtype, device: torch.device, phase: Phase
) -> nn.Module:
    """Return the loaded model. With `--quantize`, only the quantised weights come to `device`."""
    if config.quantize is None:
        return load_model(config, hf_config, dtype, device, phase)
    model = load_model(config, hf_config, dtype, torch.device("cpu"), phase)
    if is_quantised(model):
        method = quantization_method(hf_config)
        raise EngineStartError(f"the weights of {config.model} are quantised already, with {method}: drop --quantize")
    num_quantized = quantize(model, config.quantize)
    structlog.get_logger(__name__).info("weights quantised", kind=config.quantize, linears=num_quantized)
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise EngineStartError(f"not enough memory for the weights of {config.model}") from error


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
