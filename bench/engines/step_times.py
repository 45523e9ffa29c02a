"""`python -m bench.engines.step_times`: how long single steps of our engine take, one after another.

Prefills of several lengths, decodes of several numbers of rows and contexts, and decodes beside a prefill, on a shape
with random weights. With CUDA graphs, also the time of the graph alone: what is left of a step is the host's, which
async scheduling hides behind the next step. Prints one JSON object. With `--exact`, it also says whether tokens are the
same in two schedules, and fails if they are not: beside the times without the flag, that is what it costs.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.engines.same_bits import has_same_bits
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import NewSequence, Run, StepPlan
from engine.native.execution.torch_engine import TorchEngine
from loadtest.calibration.sweep import greedy
from loadtest.model_shapes import SHAPE_NAMES, write_shape

PREFILLS = (64, 512, 2048)  # tokens
DECODES = ((1, 512), (8, 512), (32, 1024), (64, 1024), (128, 512), (256, 512), (512, 128), (8, 7900))  # rows, context
MIXED = (64, 1024, (64, 512))  # decodes, their context, and tokens of the prefill beside them
REPEATS = 12
MAX_ROWS = 512


class StepTimer:
    """An engine, and sequences in it."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._step_ids, self._seq_ids = count(), count()

    def prefill(self, num_tokens: int) -> float:
        """Return the median time of the prefill of a prompt, in as few steps as it takes."""
        return median(self._time_prefill(num_tokens) for _ in range(3))

    def decode(self, rows: int, context: int) -> dict[str, float]:
        """Return the median time of a decode step, and of its graph alone if it has one."""
        runs = self._begin(rows, context)
        seconds = {"step_s": median(self._step(runs) for _ in range(REPEATS))}
        graph_s = self._graph_s(rows)
        self._end(runs)
        return seconds if graph_s is None else {**seconds, "graph_s": graph_s}

    def mixed(self, rows: int, context: int, num_tokens: int) -> float:
        """Return the median time of a step with decodes and the whole prefill of a prompt."""
        runs = self._begin(rows, context)

        def beside() -> float:
            new = self._new(num_tokens)
            run = Run(new.seq_id, num_tokens)
            seconds = self._step((*runs, run), start=(new,))
            self._end((run,))
            return seconds

        seconds = median(beside() for _ in range(REPEATS))
        self._end(runs)
        return seconds

    def has_room(self, rows: int, context: int) -> bool:
        info = self._engine.info
        fits = rows * (context // info.block_size + 8) <= info.num_blocks
        return fits and context + REPEATS < info.max_model_len and rows <= info.max_step_tokens

    def _new(self, num_tokens: int) -> NewSequence:
        number, vocab = next(self._seq_ids), self._engine.info.vocab_size
        return NewSequence(
            f"s{number}", tuple((17 + 31 * number + 7 * i) % vocab for i in range(num_tokens)), greedy(512)
        )

    def _step(self, runs: tuple[Run, ...], **plan: Any) -> float:
        started_s = time.perf_counter()
        result = self._engine.step(StepPlan(next(self._step_ids), run=runs, **plan))
        if result.failures:
            raise RuntimeError(result.failures[0].reason)
        return time.perf_counter() - started_s

    def _time_prefill(self, num_tokens: int) -> float:
        new = self._new(num_tokens)
        seconds = self._compute((new,), num_tokens)
        self._end((Run(new.seq_id, 1),))
        return seconds

    def _begin(self, rows: int, context: int) -> tuple[Run, ...]:
        """Start sequences of this length, and return the runs of their next tokens."""
        news = [self._new(context) for _ in range(rows)]
        at_once = max(1, self._engine.info.max_step_tokens // context)
        for first in range(0, rows, at_once):
            self._compute(tuple(news[first : first + at_once]), context)
        return tuple(Run(new.seq_id, 1) for new in news)

    def _compute(self, news: tuple[NewSequence, ...], num_tokens: int) -> float:
        seconds, left, starting = 0.0, num_tokens, news
        while left:
            size = min(left, self._engine.info.max_step_tokens)
            seconds += self._step(tuple(Run(new.seq_id, size) for new in news), start=starting)
            left, starting = left - size, ()
        return seconds

    def _end(self, runs: tuple[Run, ...]) -> None:
        self._engine.step(StepPlan(next(self._step_ids), abort=tuple(run.seq_id for run in runs)))

    def _graph_s(self, rows: int) -> float | None:
        replay = self._engine.decode_replay(rows)
        return None if replay is None else _device_s(replay)


def _device_s(work: Callable[[], object]) -> float:
    """Return the seconds of device time that a call takes, as the mean of several calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPEATS):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / REPEATS / 1000


def measure(engine: TorchEngine) -> dict[str, Any]:
    timer, longest = StepTimer(engine), engine.info.max_model_len
    for rows, context in DECODES[:2]:  # the first steps compile and allocate
        if timer.has_room(rows, context):
            timer.decode(rows, context)
    prefills = [{"tokens": n, "seconds": timer.prefill(n)} for n in PREFILLS if n < longest]
    decodes = [{"rows": r, "context": c, **timer.decode(r, c)} for r, c in DECODES if timer.has_room(r, c)]
    rows, context, lengths = MIXED
    mixed = [{"rows": rows, "context": context, "tokens": n, "step_s": timer.mixed(rows, context, n)} for n in lengths]
    return {"prefills": prefills, "decodes": decodes, "mixed": mixed}


def main() -> int:
    parser = argparse.ArgumentParser(prog="step_times", description=__doc__)
    parser.add_argument("--shape", choices=SHAPE_NAMES, default="8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-bytes", type=int, default=None)
    parser.add_argument("--exact", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        engine = build_torch_engine(
            EngineConfig(
                str(write_shape(Path(scratch), asked.shape)),
                load_format="dummy",
                device=asked.device,
                dtype=asked.dtype,
                kv_cache_bytes=asked.kv_cache_bytes,
                max_num_seqs=MAX_ROWS,
                prefix_cache=False,
                exact=asked.exact,
            )
        )
        about = {"device": engine.info.device, "torch": torch.__version__}
        same = {"same_bits": has_same_bits(engine)} if asked.exact else {}
        print(json.dumps({**about, **same, **measure(engine)}))
        engine.close()
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
