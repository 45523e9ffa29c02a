"""The environment variables of child processes: the same source tree, a number of threads, and offline mode."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]  # root of the source tree, or of the installed packages


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
