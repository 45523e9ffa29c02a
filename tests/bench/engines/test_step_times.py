"""The times of single steps, on a tiny shape."""

import json
import subprocess
import sys


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
