"""What this machine offers: device, fast number format, free memory.

Knows hardware; not models. Probed once at start, and the choice is logged.
"""

import os
from pathlib import Path

import torch

from engine.config import EngineStartError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(wanted: str) -> torch.device:
    """ "auto" is CUDA when there is one, else the CPU."""
    if wanted == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise EngineStartError(f"there is no kind of device named {wanted!r}: cpu and cuda are known") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineStartError(f"device {wanted!r} is not supported: cpu and cuda are")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineStartError(f"device {wanted!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the device multiplies it natively, else float32."""
    if wanted == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32
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
    """Memory that can still be allocated on `device`, as the system and its control group see it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_system_free_bytes(), _cgroup_free_bytes())


def _system_free_bytes() -> int:
    """Linux counts the page cache as available; elsewhere half of the physical memory must do."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_free_bytes() -> int:
    """What a container's limit leaves; unlimited where there is none (cgroup v2)."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return 1 << 62
    return max(0, int(limit) - int(used)) if limit != "max" else 1 << 62
