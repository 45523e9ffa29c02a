"""What the native engine finds on this machine, without loading a model's weights. For `tidegate doctor`.

Uses the same functions as the start of the engine, so that both come to the same results.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from engine.config import EngineConfig
from engine.native.cpu.build import library_or_reason
from engine.native.device import choose_device, free_bytes
from engine.native.kv.cache import LayerShape
from engine.native.kv.sizing import check_kv_cache_dtype
from engine.native.model.loader import load_config, weight_bytes
from engine.native.startup.cuda_bring_up import kernels_or_fault
from engine.native.startup.loading import dtype_of
from engine.native.startup.probe import LayerSpec

# Weights of the largest models with which this engine was measured on a GPU: 8 B parameters in 16 bits, and some more.
MEASURED_BYTES = 20 * 10**9
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # what configs call the number of experts
TRIAL_HEADS, TRIAL_SHAPE = 8, LayerShape(num_kv_heads=2, head_dim=64)  # common sizes, for a trial of the kernels


@dataclass(frozen=True, slots=True)
class Checkup:
    """What the engine would use. `no_kernels` says why it has no kernels of its own; empty: it has."""

    device: str  # with the name of the hardware
    is_gpu: bool
    dtype: str
    free_bytes: int  # of the device's memory
    weight_bytes: int | None  # of the model in `dtype`; None: not known before it is loaded
    no_kernels: str
    torch_build: str  # version of torch, and what it was built for
    for_vllm: str  # why vLLM's executor is likely to be faster with this model here; empty: it is not known to be


def examine(config: EngineConfig) -> Checkup:
    """Return what the engine of `config` would use. Raises `EngineStartError` if it could not start."""
    device = choose_device(config.device)
    check_kv_cache_dtype(config, device)
    dtype = dtype_of(config, device)
    hf_config = load_config(config)
    is_gpu = device.type == "cuda"
    weights = weight_bytes(config, hf_config, dtype)
    return Checkup(
        device=f"{device} ({torch.cuda.get_device_name(device)})" if is_gpu else "cpu",
        is_gpu=is_gpu,
        dtype=str(dtype).removeprefix("torch."),
        free_bytes=free_bytes(device),
        weight_bytes=weights,
        no_kernels=_why_no_kernels(config, device, dtype) if config.optimize else "--no-optimize",
        torch_build=f"torch {torch.__version__} for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}",
        for_vllm=reason_for_vllm(hf_config, weights) if is_gpu else "",
    )


def reason_for_vllm(config: PretrainedConfig, weights: int | None) -> str:
    """Return why vLLM's executor is likely to be faster on a GPU with a model of so many bytes; empty: it is not."""
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in EXPERTS):
        return "the model is a mixture of experts, for which this engine has no kernels of its own"
    if getattr(config, "quantization_config", None):
        return "the weights are quantised, and this engine has no kernels of its own for them"
    if weights is not None and weights > MEASURED_BYTES:
        return f"the weights take {weights / 1e9:.0f} GB, and this engine was not measured beyond 16 GB"
    return ""


def _why_no_kernels(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        fp8, specs = config.kv_cache_dtype == "fp8", [LayerSpec(TRIAL_SHAPE, None)]
        kernels: object = kernels_or_fault(specs, TRIAL_HEADS, dtype, device, fp8=fp8)
    else:
        kernels = library_or_reason()
    return kernels if isinstance(kernels, str) else ""
