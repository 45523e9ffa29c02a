"""Imports at a start: no garbage collection runs meanwhile, and afterwards they run as before."""

import subprocess
import sys

import pytest

COLLECTIONS = """
import gc
from engine.imports import without_collections

runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
{before}
was_enabled = gc.isenabled()
try:
    with without_collections():
        made = [[] for _ in range(100_000)]
        within = len(runs)
        {fault}
except ImportError:
    pass
assert within == 0 and gc.isenabled() == was_enabled
more = [[] for _ in range(100_000)]
print(bool(runs))
"""


@pytest.mark.parametrize("fault", ["", "raise ImportError"])
@pytest.mark.parametrize(("before", "afterwards"), [("", "True"), ("gc.disable()", "False")])
def test_no_collection_runs_within_and_they_run_afterwards_as_before(before: str, afterwards: str, fault: str) -> None:
    program = COLLECTIONS.format(before=before, fault=fault)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == afterwards


LOADING = """
import gc, sys
from engine.config import EngineConfig, EngineStartError
from engine.factory import build_torch_engine

def is_importing():
    builder = sys.modules.get("engine.native.startup.engine_builder")
    return "torch" in sys.modules and not hasattr(builder, "build_native_engine")

runs = []
gc.callbacks.append(lambda phase, info: runs.append(is_importing()))
try:
    build_torch_engine(EngineConfig("/no/such/model", device="cpu"))
except EngineStartError:
    print(sum(runs), "torch" in sys.modules, len(runs) > 0, gc.isenabled())
"""


def test_no_collection_runs_while_an_engine_imports_pytorch() -> None:
    ran = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "0 True True True"
