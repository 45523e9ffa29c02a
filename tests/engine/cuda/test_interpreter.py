"""Runs the kernels' tests where there is no GPU: in a process of its own, with Triton's interpreter switched on."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
TESTS = ("tests/engine/cuda/test_triton.py", "tests/engine/cuda/test_triton_layers.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are tested on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 40
    assert "skipped" not in done.stdout
