"""Chooses the device and the dtype, and measures the free memory.

Knows the hardware; does not know models. The engine asks once at its start and logs the choice.
"""

import os
from pathlib import Path

import torch

from engine.config import EngineStartError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(wanted: str) -> torch.device:
    """Return the device named `wanted`; "auto" is the first CUDA device, or the CPU if there is no CUDA device.

    Raises `EngineStartError` if the device is unknown, unsupported or missing.
    """
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise EngineStartError(f"unknown device {wanted!r}: use auto, cpu, cuda or cuda:<index>") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineStartError(f"device {wanted!r} is not supported: use auto, cpu, cuda or cuda:<index>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineStartError(f"device {wanted!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(wanted: str, device: torch.device, *, has_products: bool = False) -> torch.dtype:
    """Return the dtype named `wanted`; "auto" is bfloat16 or float32.

    It is bfloat16 if `device` multiplies bfloat16 natively, or if there are products of our own (`has_products`).
    Raises `EngineStartError` if the name is unknown.
    """
    if wanted == "auto":
        return torch.bfloat16 if has_products or _multiplies_bfloat16(device) else torch.float32
    try:
        return _DTYPES[wanted]
    except KeyError as error:
        raise EngineStartError(f"dtype {wanted!r} is not one of auto, {', '.join(_DTYPES)}") from error


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    offers = torch.cpu.get_capabilities()
    return any(offers.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`.

    On a CPU, these are the bytes that the system has free, or that the container's limit leaves if this is less.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_system_free_bytes(), _cgroup_free_bytes())


def _system_free_bytes() -> int:
    """Return the system's free memory in bytes.

    On Linux this is MemAvailable, which includes the page cache. On other systems it is half of the physical memory.
    """
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_free_bytes() -> int:
    """Return the bytes that the container's limit (cgroup v2) leaves, or 2^62 if there is no limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return 1 << 62
    return max(0, int(limit) - int(used)) if limit != "max" else 1 << 62
