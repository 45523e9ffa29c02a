"""What the native engine finds on this machine, without loading a model's weights. For `tidegate doctor`.

Uses the same functions as the start of the engine, so that both come to the same results.
"""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.native.cpu.build import library_or_reason
from engine.native.device import choose_device, choose_dtype, free_bytes
from engine.native.kv.cache import LayerShape
from engine.native.model.loader import load_config, weight_bytes
from engine.native.model.probe import LayerSpec
from engine.native.startup.cuda_bring_up import kernels_or_fault

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


def examine(config: EngineConfig) -> Checkup:
    """Return what the engine of `config` would use. Raises `EngineStartError` if it could not start."""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    hf_config = load_config(config)
    is_gpu = device.type == "cuda"
    return Checkup(
        device=f"{device} ({torch.cuda.get_device_name(device)})" if is_gpu else "cpu",
        is_gpu=is_gpu,
        dtype=str(dtype).removeprefix("torch."),
        free_bytes=free_bytes(device),
        weight_bytes=weight_bytes(config, hf_config, dtype),
        no_kernels=_why_no_kernels(device, dtype) if config.optimize else "--no-optimize",
        torch_build=f"torch {torch.__version__} for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}",
    )


def _why_no_kernels(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        kernels: object = kernels_or_fault([LayerSpec(TRIAL_SHAPE, None)], TRIAL_HEADS, dtype, device)
    else:
        kernels = library_or_reason()
    return kernels if isinstance(kernels, str) else ""
