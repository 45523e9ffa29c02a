"""The growth of a step's time with the number of streams, the context, the model size and the number of idle requests.

Drives our engine in this process, with random weights of several model shapes. Knows which values are swept; does not
know how results are shown.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.engines.idle_cost import BULK_PROMPT, BULK_TOKENS, IdleCost, IdleCostBench
from bench.engines.offline import generate_offline
from bench.engines.roofline import ModelShape, Peaks, decode_step
from bench.engines.work import WorkShape, make_job
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import StepPlan, StepResult
from loadtest.model_shapes import read_config, write_shape

if TYPE_CHECKING:  # the import of torch is left to the factory
    from engine.native.execution.torch_engine import TorchEngine

PROMPT_TOKENS = 32  # tokens of each prompt when streams or the model are varied
DECODE_STEPS = 8  # measured steps of each point
WARM_UP_TOKENS = 3  # new tokens of each sequence before a measurement
BLOCK_SIZE = 16  # tokens of a KV block
IDLE_STEPS = 30  # measured steps for each number of idle requests


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values that are swept. While one of streams, context and model is varied, the other two are fixed."""

    shape: str = "135m"
    streams: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    shapes: tuple[str, ...] = ("30m", "135m", "360m")
    shapes_streams: int = 8
    idle_requests: tuple[int, ...] = (0, 100, 1_000, 10_000)
    idle_shape: str = "tiny"


QUICK_SWEEP = Sweep("tiny", (1, 2, 4), (32, 64, 128), ("tiny",), 2, (0, 20))


@dataclass(frozen=True, slots=True)
class Machine:
    """The device, threads, number format and seed of all engines, and the measured peaks of the machine."""

    dtype: str
    device: str
    num_threads: int
    seed: int
    peaks: Peaks | None


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """The measurement of a decode step with `streams` sequences of `context` tokens.

    `prefill_tokens_per_s` is the rate at which the prompts were computed. `roofline_s` is the least time of the step;
    None if the roofline is not known.
    """

    axis: str  # "streams" | "context" | "model"
    shape: str
    streams: int
    context: int
    step_s: float
    prefill_tokens_per_s: float
    roofline_s: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.streams / self.step_s


@dataclass(frozen=True, slots=True)
class Growth:
    points: tuple[GrowthPoint, ...]
    idle: tuple[IdleCost, ...]


class GrowthBench:
    """A benchmark that runs sweeps on one machine. `scratch` is the directory for the models' files."""

    def __init__(self, machine: Machine, scratch: Path, report_progress: Callable[[str], None]) -> None:
        self._machine = machine
        self._scratch = scratch
        self._report_progress = report_progress

    def run(self, sweep: Sweep) -> Growth:
        points = [
            *self._with_engine("streams", sweep.shape, [(n, PROMPT_TOKENS) for n in sweep.streams]),
            *self._with_engine("context", sweep.shape, [(1, c) for c in sweep.contexts]),
            *(
                point
                for shape in sweep.shapes
                for point in self._with_engine("model", shape, [(sweep.shapes_streams, PROMPT_TOKENS)])
            ),
        ]
        return Growth(tuple(points), tuple(self._idle(sweep)))

    def _with_engine(self, axis: str, shape: str, cells: Sequence[tuple[int, int]]) -> list[GrowthPoint]:
        """Measure all (streams, context) pairs in `cells` on one engine, so that all of them have the same settings."""
        longest = max(context for _, context in cells) + DECODE_STEPS + 1
        kv_tokens = max(streams * _rounded(context + DECODE_STEPS + 1) for streams, context in cells)
        engine, model = self._build(shape, longest, kv_tokens, max(streams for streams, _ in cells))
        points = []
        for streams, context in cells:
            self._report_progress(f"{axis}: {shape}, {streams} streams, {context} tokens of context")
            step_s, prefill_s = self._measure(engine, streams, context)
            roofline_s = self._roofline_s(model, streams, context)
            points.append(GrowthPoint(axis, shape, streams, context, step_s, streams * context / prefill_s, roofline_s))
        engine.close()
        return points

    def _measure(self, engine: "TorchEngine", streams: int, context: int) -> tuple[float, float]:
        """Return (median seconds of a decode step, seconds until all prompts are computed) after a warm-up."""
        for new_tokens in (WARM_UP_TOKENS, 1 + DECODE_STEPS):
            shape = WorkShape((context, context), (new_tokens, new_tokens))
            job = make_job(shape, streams, engine.info.vocab_size, self._machine.seed, "growth", context, new_tokens)
            watch = _StepWatch(streams)
            generate_offline(engine, job.prompts, job.new_tokens, watch)
        return median(watch.decode_s), watch.prefill_s

    def _roofline_s(self, model: ModelShape | None, streams: int, context: int) -> float | None:
        if model is None or self._machine.peaks is None:
            return None
        return decode_step(streams, context + DECODE_STEPS // 2).roofline_s(model, self._machine.peaks)

    def _idle(self, sweep: Sweep) -> Iterable[IdleCost]:
        most = max(sweep.idle_requests)
        kv_tokens = int(1.2 * most + 64) * _rounded(BULK_PROMPT + BULK_TOKENS)
        most_tokens = 2 * most * BULK_PROMPT + 2048  # all bulk prompts in one step
        for kind in ("paused", "waiting"):
            engine, _ = self._build(sweep.idle_shape, 128, kv_tokens, 1, most_tokens)
            for count in sweep.idle_requests:
                self._report_progress(f"an interactive step beside {count} {kind} bulk requests")
                yield IdleCostBench(engine, count, kind).measure(IDLE_STEPS)
            engine.close()

    def _build(
        self, shape: str, longest: int, kv_tokens: int, max_num_seqs: int, max_step_tokens: int = 2048
    ) -> tuple["TorchEngine", ModelShape | None]:
        directory = write_shape(self._scratch / f"{shape}-{longest}", shape, max_position_embeddings=longest)
        model = ModelShape.from_config(read_config(directory), self._machine.dtype)
        kv_token_bytes = model.kv_token_bytes if model else 0
        config = EngineConfig(
            model=str(directory),
            load_format="dummy",
            dtype=self._machine.dtype,
            device=self._machine.device,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            kv_cache_bytes=(kv_tokens + BLOCK_SIZE) * kv_token_bytes or None,
            num_threads=self._machine.num_threads,
            seed=self._machine.seed,
        )
        return build_torch_engine(config), model


class _StepWatch:
    """A stopwatch for the steps of one run, outside the engine.

    `decode_s` has the time of each step in which all sequences decode. `prefill_s` is the time of all steps before the
    first of these.
    """

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._started_s = self._last_s = time.perf_counter()
        self.prefill_s = 0.0
        self.decode_s: list[float] = []

    def __call__(self, plan: StepPlan, result: StepResult) -> None:
        now_s = time.perf_counter()
        if len(plan.run) == self._streams and all(run.num_tokens == 1 for run in plan.run):
            self.decode_s.append(now_s - self._last_s)
        elif not self.decode_s:
            self.prefill_s = now_s - self._started_s
        self._last_s = now_s


def _rounded(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
