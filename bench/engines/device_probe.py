"""`python -m bench.engines.device_probe COMMAND`: measures the machine's peak rates, or how busy a GPU is.

The command `peaks` measures memory bandwidth and matrix products, for the roofline. The command `busy` measures the
share of a decode run's time in which GPU kernels ran. Both print one JSON object. The probe imports torch, and
therefore always runs in its own process.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.engines.roofline import ModelShape, Peaks
from bench.engines.systems.protocol import KV_ROUNDING, SystemSpec
from bench.engines.systems.scheduled import ScheduledEngine
from bench.engines.work import Job, WorkShape, make_job
from engine.native.device import choose_device
from loadtest.model_shapes import read_config, shape_with_weights

READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 33}  # bytes of the measured read and copy; far more than any cache holds
MATRIX_ROWS = {"cpu": 1024, "cuda": 8192}
REPEATS = 8  # measured runs; the fastest of them is the peak
PROMPT_TOKENS = 32  # tokens of each prompt of `busy`


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Return the highest rates of several large reads, copies and matrix products."""
    return Peaks(_bytes_per_s(device), _flops_per_s(device, dtype))


def _bytes_per_s(device: torch.device) -> float:
    num_bytes = READ_BYTES[device.type]
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read_s = _best_s(lambda: source.max(), device)
    copy_s = _best_s(lambda: target.copy_(source), device)
    return max(num_bytes / read_s, 2 * num_bytes / copy_s)


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    rows = MATRIX_ROWS[device.type]
    left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    return 2.0 * rows**3 / _best_s(lambda: left @ right, device)


def _best_s(work: Callable[[], Tensor], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first run is not counted: it has page faults and lazy initialization
        _wait(device)
        started_s = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started_s)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy_share(model_dir: str, dtype: str, streams: int, new_tokens: int) -> dict[str, float]:
    """Return the share of a decode run's time in which a GPU kernel ran, and the times it was computed from.

    The run decodes `streams` sequences with our engine and the scheduler loop. The profiler slows down the host, but
    not the kernels. Therefore the run is also timed without the profiler, as `plain_s`, and `share_of_plain` is the
    time of the kernels ÷ `plain_s`.
    """
    system, jobs = _loaded(model_dir, dtype, streams, new_tokens)
    with closing(system):
        system.generate(jobs[0].prompts, jobs[0].new_tokens)
        plain_s = _timed(lambda: system.generate(jobs[1].prompts, jobs[1].new_tokens))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            profiled_s = _timed(lambda: system.generate(jobs[2].prompts, jobs[2].new_tokens))
    busy_s = covered_s((e.time_range.start, e.time_range.end) for e in _kernels(profiler)) * 1e-6
    return {
        "busy_s": busy_s,
        "profiled_s": profiled_s,
        "plain_s": plain_s,
        "share": busy_s / profiled_s,
        "share_of_plain": busy_s / plain_s,
    }


def _loaded(model_dir: str, dtype: str, streams: int, new_tokens: int) -> tuple[ScheduledEngine, list[Job]]:
    """Return the loaded system, and three jobs of the same lengths with different tokens."""
    config = read_config(Path(model_dir))
    shape = ModelShape.from_config(config, dtype)
    longest = PROMPT_TOKENS + new_tokens
    rounded = -(-longest // KV_ROUNDING) * KV_ROUNDING
    kv_token_bytes = shape.kv_token_bytes if shape else 0
    threads = torch.get_num_threads()
    spec = SystemSpec(model_dir, dtype, "cuda", threads, longest, streams, (streams + 1) * rounded, kv_token_bytes)
    work = WorkShape((PROMPT_TOKENS,) * 2, (new_tokens,) * 2)
    jobs = [make_job(work, streams, int(config["vocab_size"]), 0, "busy", i) for i in range(3)]
    return ScheduledEngine(spec), jobs


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started_s


def _kernels(profiler: Any) -> list[Any]:
    """Return the profiler's events on the GPU: kernels and copies."""
    return [event for event in profiler.events() if event.device_type.name == "CUDA"]


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, in their unit. Overlapping kernels thus count once."""
    total, end_so_far = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, end_so_far))
        end_so_far = max(end_so_far, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="device_probe")
    parser.add_argument("command", choices=("peaks", "busy"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", default="", help="busy: this one with random weights, in place of --model")
    parser.add_argument("--weights-dir", type=Path, default=None, help="where they are, or are made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    device, dtype = choose_device(asked.device), getattr(torch, asked.dtype)
    result: dict[str, Any] = {"device": str(device), "torch": torch.__version__}
    if asked.command == "peaks":
        result |= asdict(measure_peaks(device, dtype))
    else:
        model = asked.model
        if asked.shape:
            model = str(shape_with_weights(asked.shape, asked.dtype, asked.device, asked.seed, asked.weights_dir))
        result |= busy_share(model, asked.dtype, asked.streams, asked.new_tokens)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
