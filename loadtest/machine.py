"""The machine that this process runs on: a description in one line, and the CPU cores that may be used."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path


def hardware() -> str:
    """Return a description of the client's machine in one line.

    It also describes the server's machine if the server is on loopback.
    """
    parts = [f"{_cpu_name()}, {len(usable_cores())} cores", f"{platform.system()} {platform.machine()}"]
    parts.append(f"Python {sys.version_info.major}.{sys.version_info.minor}")
    return "; ".join([*parts, *_gpu_names()])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown CPU")


def _gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def usable_cores() -> list[int]:
    """Return the CPU cores that this process may run on, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
