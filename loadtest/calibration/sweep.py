"""Drive an engine through random steps of every kind, to measure their times. A cost card is fitted to these data.

Decode-only, prefill-only and mixed steps alternate. Their numbers of sequences and tokens are drawn log-uniformly, from
a pool of sequences of many lengths. Under real load, the features of steps are correlated; the random draws prevent
this. Knows the engine's interface; does not know which model is fitted.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter
from typing import Protocol

from engine.interface import EngineInfo, NewSequence, Run, SamplingParams, StepPlan, StepResult
from engine.step_time.cost import StepWork
from scheduler.drivers.steps.step_log import StepEntry

KINDS = ("decode", "prefill", "mixed", "decode", "mixed")
WARM_UP_STEPS = 8  # steps in which kernels are compiled and caches filled
MIN_CHUNK = 16  # tokens of the shortest chunk
SHARE_OF_BLOCKS = 0.9  # share of the KV blocks that the pool may fill
LONGEST_CHUNK = 1024  # tokens; two shorter chunks give the same information as a longer one
SHORTEST_LIMIT = 64  # tokens; on a slow engine, the limit on chunks is not reduced below this
LONGEST_STEP = 1 / 60  # share of the sweep's time; a step that takes longer makes the next chunks shorter
REPEATED_DECODES = (1, 4, 16, 32, 64)
REPEATED_CONTEXT = 64  # tokens of each prompt before the identical steps
REPEATS = 15  # number of identical steps for each number of decodes


class Stepper(Protocol):
    """An engine whose `step` blocks until the step is done."""

    @property
    def info(self) -> EngineInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters for greedy sampling of exactly `max_tokens` tokens; an end-of-sequence token is ignored."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class SweepLimits:
    seconds: float = 60.0
    max_decodes: int = 64
    max_context: int = 4096


@dataclass(slots=True)
class _Sequence:
    prompt_tokens: int
    num_computed: int = 0

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.prompt_tokens


class Sweep:
    """A sweep of one engine: the engine and its pool of sequences. `clock` returns seconds."""

    def __init__(
        self, engine: Stepper, limits: SweepLimits, seed: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._random = random.Random(seed)
        info = engine.info
        self._longest = min(limits.max_context, info.max_model_len - 1)
        self._room = int(SHARE_OF_BLOCKS * info.num_blocks)
        self._most_decodes = min(limits.max_decodes, info.max_step_tokens // 2)
        self._longest_chunk = min(LONGEST_CHUNK, info.max_step_tokens, self._longest)
        self._pool: dict[str, _Sequence] = {}
        self._abort: list[str] = []
        self._step_id = 0
        self._num_started = 0

    def run(self) -> Iterator[StepEntry]:
        """Yield the measured steps until the sweep's time is over. Afterwards the engine holds no sequence."""
        for _ in range(WARM_UP_STEPS):
            self._step("mixed")
        until_s = self._clock() + self._limits.seconds
        while self._clock() < until_s:
            yield self._step(KINDS[self._step_id % len(KINDS)])
        self._clear()

    def repeat(self) -> list[list[float]]:
        """Run identical steps. Return one list of measured seconds for each number of decodes.

        The spread of such a list is the noise of the machine, and therefore a lower bound for the error of any model.
        Afterwards the engine holds no sequence.
        """
        counts = [n for n in REPEATED_DECODES if n <= self._most_decodes]
        length = min(REPEATED_CONTEXT, self._longest - REPEATS * len(counts) - 1, self._longest_chunk)
        seconds: list[list[float]] = []
        for count in counts if length > 1 else ():
            while len(self._pool) < count:
                new = self._new_sequence(length)
                self._submit(StepPlan(self._step_id, start=(new,), run=(Run(new.seq_id, length),)))
            run = tuple(Run(seq_id, 1) for seq_id in self._pool)
            seconds.append([self._submit(StepPlan(self._step_id, run=run)).elapsed_s for _ in range(REPEATS)])
        self._clear()
        return seconds

    def _clear(self) -> None:
        self._engine.step(StepPlan(self._step_id, abort=(*self._abort, *self._pool)))
        self._step_id += 1
        self._abort.clear()
        self._pool.clear()

    def _step(self, kind: str) -> StepEntry:
        self._retire()
        decoding = sorted((i for i, r in self._pool.items() if r.is_decoding), key=lambda i: self._pool[i].num_computed)
        runs: list[Run] = []
        start: tuple[NewSequence, ...] = ()
        if kind != "prefill" and decoding:
            runs += [Run(seq_id, 1) for seq_id in self._draw_decodes(decoding)]
        if kind != "decode" or not runs:
            chunk, start = self._draw_chunk(self._engine.info.max_step_tokens - len(runs))
            runs.append(chunk)
        plan = StepPlan(self._step_id, abort=tuple(self._abort), start=start, run=tuple(runs))
        self._abort.clear()
        return self._apply_result(self._submit(plan))

    def _submit(self, plan: StepPlan) -> StepResult:
        self._step_id += 1
        return self._engine.step(plan)

    def _draw_decodes(self, decoding: list[str]) -> list[str]:
        """Return decoding sequences of similar length: all short, or all long."""
        count = min(len(decoding), self._log_uniform(1, self._most_decodes))
        first = self._random.randint(0, len(decoding) - count)
        return decoding[first : first + count]

    def _draw_chunk(self, most: int) -> tuple[Run, tuple[NewSequence, ...]]:
        """Return a chunk of a prompt, and the sequence that starts with this chunk, if any.

        If a prompt in the pool is not complete, the chunk continues it. Otherwise the chunk starts a new sequence.
        """
        wanted = min(most, self._log_uniform(MIN_CHUNK, self._longest_chunk))
        for seq_id, resident in self._pool.items():
            left = resident.prompt_tokens - resident.num_computed
            if left > 1:
                return Run(seq_id, min(wanted, left)), ()
        length = self._log_uniform(MIN_CHUNK, self._longest)
        new = self._new_sequence(length)
        return Run(new.seq_id, min(wanted, length)), (new,)

    def _new_sequence(self, length: int) -> NewSequence:
        seq_id = f"sweep-{self._num_started}"
        self._num_started += 1
        token_ids = tuple(self._random.randrange(self._engine.info.vocab_size) for _ in range(length))
        self._pool[seq_id] = _Sequence(length)
        # A different salt for each sequence prevents hits in the prefix cache, which would skip the prefill.
        return NewSequence(seq_id, token_ids, greedy(1 << 30), cache_salt=seq_id)

    def _apply_result(self, result: StepResult) -> StepEntry:
        work = StepWork()
        for output in result.outputs:
            resident = self._pool[output.seq_id]
            work.add(output.num_computed_tokens - resident.num_computed, resident.num_computed)
            resident.num_computed = output.num_computed_tokens
            if output.finish_reason is not None:
                del self._pool[output.seq_id]
        for failure in result.failures:
            del self._pool[failure.seq_id]
        if result.elapsed_s > LONGEST_STEP * self._limits.seconds and work.prefill_tokens > SHORTEST_LIMIT:
            self._longest_chunk = max(SHORTEST_LIMIT, self._longest_chunk // 2)
        return StepEntry.of(work, result.elapsed_s, self._clock())

    def _retire(self) -> None:
        """End random sequences until there is room for another chunk.

        There is room if the longest chunk fits into the KV memory and not too many sequences are decoding.
        """
        block_size = self._engine.info.block_size
        while self._pool:
            held = sum(-(-r.num_computed // block_size) + 1 for r in self._pool.values())
            decoding = [i for i, r in self._pool.items() if r.is_decoding]
            too_many = len(decoding) > 2 * self._most_decodes
            if held + self._longest_chunk // block_size + 1 <= self._room and not too_many:
                return
            gone = self._random.choice(decoding or list(self._pool))
            self._abort.append(gone)
            del self._pool[gone]

    def _log_uniform(self, low: int, high: int) -> int:
        """Return a random integer from `low` to `high`. Each octave is equally likely."""
        return round(low * (high / low) ** self._random.random()) if high > low else high


def repeated_mape(alike: Sequence[Sequence[float]]) -> float | None:
    """Return the mean of |seconds ÷ their median − 1| over all groups of identical steps.

    Return None if there are no groups.
    """
    off = [abs(s / median(group) - 1.0) for group in alike for s in group]
    return fmean(off) if off else None
