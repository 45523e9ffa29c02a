"""The machine's measured peaks, from a process of their own: this one neither loads torch nor keeps its threads."""

import json
import subprocess
import sys

from bench.engines.roofline import Peaks
from loadtest.child_environment import python_environment

TIMEOUT_S = 180.0


def measure_peaks(device: str, dtype: str, num_threads: int) -> Peaks | None:
    """None where the probe does not run: a comparison without floors is still one."""
    command = [sys.executable, "-m", "bench.engines.device_probe", "peaks", "--device", device]
    command += ["--dtype", dtype, "--threads", str(num_threads)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=python_environment(num_threads)
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return Peaks(float(found["bytes_per_s"]), float(found["flops_per_s"]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, KeyError) as error:
        print(f"no floors: the machine's peaks could not be measured: {error}", file=sys.stderr)
        return None
