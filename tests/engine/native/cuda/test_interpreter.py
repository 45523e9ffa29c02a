"""Run the kernels' tests without a GPU, in separate processes with Triton's interpreter."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
TESTS = ("tests/engine/native/cuda/test_triton.py", "tests/engine/native/cuda/test_triton_layers.py")
HALVES = ("generate", "not generate")  # tests of whole engines, and of single kernels: both take about the same time


def can_interpret() -> bool:
    try:
        return tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are tested on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
@pytest.mark.skipif(not can_interpret(), reason="no triton, or one whose interpreter does not know today's numpy")
def test_the_kernels_in_the_interpreter() -> None:
    with ThreadPoolExecutor() as both:
        assert sum(both.map(passed_in_the_interpreter, HALVES)) >= 39


def passed_in_the_interpreter(expression: str) -> int:
    """Run the tests that `expression` selects; return their number. None may fail or be skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", expression, *TESTS]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])
