"""Run the kernels' tests without a GPU, in separate processes with Triton's interpreter.

A case of each kernel in `make test`, all of them and whole engines in `make test-all`.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
TESTS = [f"tests/engine/native/cuda/{name}.py" for name in ("test_triton", "test_exact")]


def can_interpret() -> bool:
    try:
        return tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are tested on the GPU"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process"),
    pytest.mark.skipif(not can_interpret(), reason="no triton, or one whose interpreter does not know today's numpy"),
]


@pytest.mark.timeout(1300)
def test_a_case_of_each_kernel() -> None:
    assert passed_in_the_interpreter("-m", "not full") >= 15


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_all_cases_and_whole_engines() -> None:
    assert passed_in_the_interpreter() >= 48


def passed_in_the_interpreter(*selection: str) -> int:
    """Run the tests that these options of pytest select; return their number. None may fail or be skipped."""
    options = ("-q", "-p", "no:cacheprovider", "-o", "timeout=0")  # the limit of all of them together is below
    command = [sys.executable, "-m", "pytest", *options, *selection, *TESTS]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    return int(passed[1])
