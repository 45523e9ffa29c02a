"""The times of single steps, on a tiny shape."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engines.same_bits import has_same_bits
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from loadtest.model_shapes import write_shape
from tests.engine.native.cpu.compiled import library_with_products


@pytest.mark.timeout(330)
def test_every_kind_of_step_has_a_time() -> None:
    command = [sys.executable, "-m", "bench.engines.step_times", "--shape", "tiny", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert [entry["tokens"] for entry in found["prefills"]] == [64, 512, 2048]
    assert [(entry["rows"], entry["context"]) for entry in found["decodes"]][::7] == [(1, 512), (8, 7900)]
    assert [entry["tokens"] for entry in found["mixed"]] == [64, 512]
    times_s = [
        entry.get("seconds") or entry["step_s"] for kind in ("prefills", "decodes", "mixed") for entry in found[kind]
    ]
    assert len(times_s) == 13
    assert min(times_s) > 0


def test_exact_tokens_are_the_same_in_two_schedules_and_others_are_not() -> None:
    library_with_products()
    with tempfile.TemporaryDirectory() as scratch:
        model = str(write_shape(Path(scratch), "tiny"))
        config = EngineConfig(model, load_format="dummy", device="cpu", dtype="bfloat16", kv_cache_bytes=1 << 24)
        assert has_same_bits(build_torch_engine(replace(config, exact=True)))
        assert not has_same_bits(build_torch_engine(config))
