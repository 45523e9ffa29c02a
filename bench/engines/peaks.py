"""The machine's peak rates, measured in a separate process, so that this process does not load torch or its threads."""

import json
import subprocess
import sys

from bench.engines.roofline import Peaks
from loadtest.child_environment import python_environment

TIMEOUT_S = 180.0  # seconds for the probe, including the import of torch


def measure_peaks(device: str, dtype: str, num_threads: int) -> Peaks | None:
    """Return the peaks; None if the probe fails, since a comparison without a roofline is still useful."""
    command = [sys.executable, "-m", "bench.engines.device_probe", "peaks", "--device", device]
    command += ["--dtype", dtype, "--threads", str(num_threads)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=python_environment(num_threads)
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return Peaks(float(found["bytes_per_s"]), float(found["flops_per_s"]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, KeyError) as error:
        print(f"no roofline: the machine's peaks could not be measured: {error}", file=sys.stderr)
        return None
