"""The command `engines`: it measures engines without a server, in processes on this machine.

Knows flags, files and exit codes.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from bench.engines.comparison import Plan, compare
from bench.engines.comparison_report import OURS, ComparisonReport
from bench.engines.roofline import ModelShape, Peaks
from bench.engines.systems.client import SystemClient
from bench.engines.systems.process import SYSTEMS
from bench.engines.systems.protocol import KV_ROUNDING, SystemSpec
from bench.engines.work import WorkKind, longest_sequence
from engine import gguf
from loadtest.commands import ModelCommand
from loadtest.machine import python_environment
from loadtest.model_shapes import ShapeError, read_config
from loadtest.running import one_sentence, print_progress

PEAKS_TIMEOUT_S = 180.0  # seconds for the probe, including the import of torch


class Engines(ModelCommand):
    """Our engine compared with transformers, vLLM and llama.cpp on the same weights.

    The systems run the same jobs in turn. Reports throughput, ratios, times of decode steps and shares of the roofline.
    """

    systems: str = Field(
        "tidegate,tidegate-loop,generate_batch,generate,vllm", description="The names of the systems to measure."
    )
    vllm_python: str = Field("", description="Python of an environment that has vLLM; without it vLLM is left out.")
    llama_python: str = Field(".venv-llama/bin/python", description="Python of an environment that has xllamacpp.")
    work: str = Field("decode,prefill,mixed", description="The kinds of work to measure.")
    streams: str = Field("1,8,32", description="Numbers of requests that run at once.")
    rounds: int = Field(5, ge=1, le=100, description="Times that every system gets every kind of work.")
    minutes: float | None = Field(None, gt=0, description="Begin no other job after so many minutes; unset: do all.")
    serial_requests: int = Field(
        2, ge=1, description="Requests of a job for the system that serves one request at a time."
    )
    logs: Path | None = Field(None, description="Directory for the systems' logs; unset: the logs are not kept.")

    def cli_cmd(self) -> None:
        with one_sentence(ShapeError, ValueError), tempfile.TemporaryDirectory() as scratch:
            passed = self._measure(self.logs or Path(scratch))
        if not passed:
            raise SystemExit(1)

    def _measure(self, logs: Path) -> bool:
        is_over = time_limit(math.inf if self.minutes is None else self.minutes)
        model_dir, file = self.model_dir(), ""
        if model_dir.suffix == gguf.SUFFIX:
            model_dir, file = gguf.unpacked(model_dir, with_weights=False), str(model_dir.resolve())
        config = read_config(model_dir)
        plan = self._plan(int(config["vocab_size"]))
        shape = ModelShape.from_config(config, self.dtype, Path(file).stat().st_size if file else None)
        peaks = measure_peaks(self.device, self.dtype, self.num_threads)
        with ExitStack() as stack:
            clients = [stack.enter_context(c) for c in self._clients(plan, model_dir, file, shape, logs)]
            comparison = compare(plan, clients, print_progress, is_over)
        if "vllm" in self._names() and not self.vllm_python:
            comparison.unavailable["vllm"] = "no --vllm-python was given"
        # Whatever else ran on the machine made one of the two probes slower.
        peaks = higher(peaks, measure_peaks(self.device, self.dtype, self.num_threads))
        self._conclude(ComparisonReport(comparison, shape, peaks), str(model_dir))
        return any(sample.system == OURS for sample in comparison.samples) and OURS not in comparison.unavailable

    def _conclude(self, comparison: ComparisonReport, model: str) -> None:
        self.conclude(comparison.record(), model)

    def _plan(self, vocab_size: int) -> Plan:
        return Plan(
            works=tuple(WorkKind(name) for name in _listed(self.work)),
            streams=tuple(int(number) for number in _listed(self.streams)),
            rounds=self.rounds,
            seed=self.seed,
            vocab_size=vocab_size,
            is_quick=self.quick,
            serial_requests=self.serial_requests,
        )

    def _clients(
        self, plan: Plan, model_dir: Path, file: str, shape: ModelShape | None, logs: Path
    ) -> list[SystemClient]:
        logs.mkdir(parents=True, exist_ok=True)
        spec = replace(self._spec(plan, model_dir, shape), gguf=file)
        pythons = {"vllm": self.vllm_python, "llama": self.llama_python}
        return [
            SystemClient(name, spec, logs / f"{name}.log", pythons.get(name, sys.executable))
            for name in self._names()
            if name != "vllm" or self.vllm_python
        ]

    def _names(self) -> list[str]:
        names = _listed(self.systems)
        if unknown := [name for name in names if name not in SYSTEMS]:
            raise ValueError(f"there is no system {unknown[0]!r}: {', '.join(SYSTEMS)} are known")
        return names

    def _spec(self, plan: Plan, model_dir: Path, shape: ModelShape | None) -> SystemSpec:
        longest = longest_sequence(plan.shape(work) for work in plan.works)
        rounded = -(-longest // KV_ROUNDING) * KV_ROUNDING
        most = max(plan.streams)
        return SystemSpec(
            model_dir=str(model_dir.resolve()),
            dtype=self.dtype,
            device=self.device,
            num_threads=self.num_threads,
            max_model_len=longest,
            max_num_seqs=most,
            kv_tokens=(most + 1) * rounded,
            kv_token_bytes=shape.kv_token_bytes if shape else 0,
        )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def time_limit(minutes: float) -> Callable[[], bool]:
    """Return a function that tells whether so many minutes have passed from now."""
    end_s = time.monotonic() + 60 * minutes
    return lambda: time.monotonic() >= end_s


def higher(one: Peaks | None, other: Peaks | None) -> Peaks | None:
    """Return the higher of both rates; None if nothing was measured."""
    if one is None or other is None:
        return one or other
    return Peaks(max(one.bytes_per_s, other.bytes_per_s), max(one.flops_per_s, other.flops_per_s))


def measure_peaks(device: str, dtype: str, num_threads: int) -> Peaks | None:
    """Return the machine's peak rates; None if they cannot be measured: the comparison then has no roofline.

    They are measured in a process of their own, so that this one loads neither torch nor its threads.
    """
    command = [sys.executable, "-m", "bench.engines.device_probe", "peaks", "--device", device]
    command += ["--dtype", dtype, "--threads", str(num_threads)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PEAKS_TIMEOUT_S,
            check=True,
            env=python_environment(num_threads),
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return Peaks(float(found["bytes_per_s"]), float(found["flops_per_s"]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError, KeyError) as error:
        print(f"no roofline: the machine's peaks could not be measured: {error}", file=sys.stderr)
        return None
