"""This machine: its description in one line, the CPU cores that may be used, and the environment of child processes."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]  # root of the source tree, or of the installed packages


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


def python_environment(num_threads: int) -> dict[str, str]:
    """Return the environment of an offline Python child that imports the same packages and uses `num_threads`."""
    return threads_environment(num_threads) | {"PYTHONPATH": python_path()}


def python_path() -> str:
    """Return a PYTHONPATH with which a child process finds the same source tree from any working directory."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def threads_environment(num_threads: int) -> dict[str, str]:
    """Return this process's environment with `num_threads` for OpenMP and MKL, and with downloads switched off."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
