"""A soak test: the engine runs under random load for minutes, to show whether memory grows or blocks are not freed.

Sequences of random lengths start and end; some are paused, swapped, recomputed or aborted, and some sample with a seed.
An error of the engine ends the soak. Knows the engine's interface and this process's memory.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean

import psutil

from bench.engines.systems.offline import GenerationFailed
from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import (
    NewSequence,
    Preempt,
    PreemptionMode,
    Run,
    SamplingParams,
    StepPlan,
    StepResult,
    blocks_for,
)
from loadtest.calibration.stepper import Stepper
from loadtest.reporting.record import Record, Section

MAX_RUNNING = 24  # sequences in one step
MAX_HELD = 32  # unfinished sequences, running or preempted
SETTLE_SHARE = 0.1  # share of the run at its start in which memory is not sampled: arenas and caches still grow
OVERCOMMIT = 1.5  # KV of all sequences at their longest ÷ KV memory; above 1, some sequences must wait for blocks
P_PREEMPT, P_ABORT, P_RESUME = 0.05, 0.005, 0.3  # probability for each sequence and step
MAX_GROWTH = 0.02  # largest allowed growth of the mean RSS from the first half of the run to the second


@dataclass(frozen=True, slots=True)
class SoakResult:
    seconds: float
    steps: int
    tokens: int
    finished: int
    aborted: int
    preemptions: dict[str, int]
    rss_bytes: tuple[int, ...]  # RSS at regular intervals, without the start of the run
    blocks_lost: int  # KV blocks that were not free at the end

    @property
    def growth(self) -> float:
        """Growth of the RSS: its mean in the second half ÷ its mean in the first half − 1."""
        return rss_growth(self.rss_bytes)

    def record(self) -> Record:
        first, last = (self.rss_bytes[i] / 2**20 if self.rss_bytes else 0.0 for i in (0, -1))
        verdict = "flat" if self.growth <= MAX_GROWTH else f"GREW, by more than {MAX_GROWTH:.0%}"
        preemptions = ", ".join(f"{count} by {mode}" for mode, count in self.preemptions.items())
        notes = (
            f"{self.steps} steps and {self.tokens} tokens in {self.seconds:.0f} s: {self.finished} finished, "
            f"{self.aborted} aborted; preempted: {preemptions}",
            f"RSS {first:.1f} MiB first, {last:.1f} MiB last, second half {self.growth:+.2%}: {verdict}",
            "all KV blocks came back" if not self.blocks_lost else f"LOST: {self.blocks_lost} KV blocks",
        )
        data = asdict(self) | {"growth": self.growth, "passed": self.passed}
        return Record(sections=[Section(notes=notes)], data=data)

    @property
    def passed(self) -> bool:
        return self.growth <= MAX_GROWTH and self.blocks_lost == 0 and self.finished > 0


def rss_growth(samples: tuple[int, ...]) -> float:
    middle = len(samples) // 2
    return fmean(samples[middle:]) / fmean(samples[:middle]) - 1.0 if middle else 0.0


@dataclass(slots=True)
class _Sequence:
    """The soak's own state of a sequence: its tokens so far, and how it was preempted."""

    new: NewSequence
    num_known: int
    num_computed: int = 0
    mode: PreemptionMode | None = None  # how it was preempted; None: it may run

    @property
    def num_uncomputed(self) -> int:
        return self.num_known - self.num_computed


def run_soak(config: EngineConfig, seconds: float, seed: int, report_progress: Callable[[str], None]) -> SoakResult:
    """Build the engine, keep it under load for `seconds`, and return the result."""
    engine = build_torch_engine(config)
    try:
        return Soak(engine, seed).run(seconds, report_progress)
    finally:
        engine.close()


class Soak:
    """One soak of one engine. An object runs only once. `now_s` reads a monotonic clock."""

    def __init__(self, engine: Stepper, seed: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._now_s = now_s
        self._info = engine.info
        self._random = random.Random(seed)
        self._held: dict[str, _Sequence] = {}
        self._free_blocks = engine.info.num_blocks
        self._steps = self._tokens = self._started = self._finished = self._aborted = 0
        self._preemptions = {mode.value: 0 for mode in self._modes()}

    def run(self, seconds: float, report_progress: Callable[[str], None] = lambda line: None) -> SoakResult:
        """Run the soak. Raises `GenerationFailed` if a sequence fails; errors of the engine are passed on."""
        memory = psutil.Process().memory_info
        samples: list[int] = []
        began_s = self._now_s()
        every_s = max(seconds / 200, 0.02)
        next_s = began_s + SETTLE_SHARE * seconds
        while (now_s := self._now_s()) - began_s < seconds:
            self._step()
            if now_s >= next_s:
                samples.append(memory().rss)
                next_s += every_s
                if len(samples) % 20 == 0:
                    report_progress(f"{now_s - began_s:.0f} s: {self._steps} steps, RSS {samples[-1] / 2**20:.1f} MiB")
        self._end()
        return SoakResult(
            seconds=seconds,
            steps=self._steps,
            tokens=self._tokens,
            finished=self._finished,
            aborted=self._aborted,
            preemptions=self._preemptions,
            rss_bytes=tuple(samples),
            blocks_lost=self._info.num_blocks - self._free_blocks,
        )

    def _modes(self) -> list[PreemptionMode]:
        return [mode for mode in PreemptionMode if mode.value in self._info.preemption_modes]

    def _step(self) -> None:
        abort = self._choose_aborts()
        # Resumes are chosen before preemptions, so that a preempted sequence misses at least one step.
        resume = self._choose_resumes()
        preempt = self._choose_preemptions(resume)
        start, run = self._choose_runs()
        plan = StepPlan(self._steps, abort, preempt, resume, start, run)
        self._steps += 1
        self._apply_result(self._engine.step(plan))

    def _choose_aborts(self) -> tuple[str, ...]:
        gone = tuple(i for i in self._held if self._random.random() < P_ABORT)
        for seq_id in gone:
            held = self._held.pop(seq_id)
            self._free_blocks += self._blocks(held)
            self._aborted += 1
        return gone

    def _choose_preemptions(self, resumed: tuple[str, ...]) -> tuple[Preempt, ...]:
        chosen = []
        for seq_id, held in self._held.items():
            may = held.mode is None and held.num_computed and seq_id not in resumed
            if may and self._random.random() < P_PREEMPT:
                mode = self._random.choice(self._modes())
                if mode is PreemptionMode.SWAP and not self._can_swap(held):
                    continue
                chosen.append(Preempt(seq_id, mode))
                self._preempt(held, mode)
        return tuple(chosen)

    def _preempt(self, held: _Sequence, mode: PreemptionMode) -> None:
        self._preemptions[mode.value] += 1
        if mode is not PreemptionMode.PAUSE:
            self._free_blocks += self._blocks(held)
        if mode is PreemptionMode.RECOMPUTE:
            held.num_computed = 0
        held.mode = mode

    def _can_swap(self, held: _Sequence) -> bool:
        swapped = sum(self._blocks(h) for h in self._held.values() if h.mode is PreemptionMode.SWAP)
        return swapped + self._blocks(held) <= self._info.num_swap_blocks

    def _choose_resumes(self) -> tuple[str, ...]:
        """Choose preempted sequences at random and mark them as running; return their ids.

        At most `MAX_RUNNING` sequences run. A swapped sequence is resumed only if enough blocks are free for it.
        """
        resumed = []
        for seq_id, held in self._held.items():
            is_resumed = held.mode is not None and (self._random.random() < P_RESUME)
            if not is_resumed or self._num_running() >= MAX_RUNNING:
                continue
            blocks = self._blocks(held) if held.mode is PreemptionMode.SWAP else 0
            if blocks <= self._free_blocks:
                self._free_blocks -= blocks
                held.mode = None
                resumed.append(seq_id)
        return tuple(resumed)

    def _num_running(self) -> int:
        return sum(held.mode is None for held in self._held.values())

    def _choose_runs(self) -> tuple[tuple[NewSequence, ...], tuple[Run, ...]]:
        start: list[NewSequence] = []
        while self._num_running() < MAX_RUNNING and len(self._held) < MAX_HELD:
            start.append(self._new_sequence())
            self._held[start[-1].seq_id] = _Sequence(start[-1], len(start[-1].prompt_token_ids))
        runs: list[Run] = []
        tokens_left = self._info.max_step_tokens
        for seq_id, held in self._held.items():
            count = min(tokens_left, self._chunk(held)) if held.mode is None else 0
            if count and self._reserve(held, count):
                runs.append(Run(seq_id, count))
                tokens_left -= count
        return tuple(start), tuple(runs)

    def _chunk(self, held: _Sequence) -> int:
        return held.num_uncomputed if held.num_uncomputed < 2 else self._random.randint(1, held.num_uncomputed)

    def _reserve(self, held: _Sequence, count: int) -> bool:
        # A sequence without KV may find a prefix in the prefix cache. Its step then ends at a later token than `count`.
        end = held.num_computed + count if held.num_computed else held.num_known
        missing = blocks_for(end, self._info.block_size) - self._blocks(held)
        if missing > self._free_blocks:
            return False
        self._free_blocks -= max(0, missing)
        return True

    def _blocks(self, held: _Sequence) -> int:
        return blocks_for(held.num_computed, self._info.block_size)

    def _new_sequence(self) -> NewSequence:
        rng = self._random
        self._started += 1
        share = self._info.num_blocks * self._info.block_size // MAX_HELD
        room = min(self._info.max_model_len, int(OVERCOMMIT * share))
        prompt = rng.randint(1, max(1, room // 2))
        is_greedy = rng.random() < 0.5
        sampling = SamplingParams(
            max_tokens=rng.randint(1, max(1, room - prompt - 1)),
            temperature=0.0 if is_greedy else 0.8,
            top_p=1.0 if is_greedy else 0.95,
            seed=self._started,
            ignore_eos=rng.random() < 0.5,
        )
        token_ids = tuple(rng.randrange(self._info.vocab_size) for _ in range(prompt))
        return NewSequence(f"soak-{self._started}", token_ids, sampling)

    def _apply_result(self, result: StepResult) -> None:
        if result.failures:
            raise GenerationFailed(f"{result.failures[0].seq_id}: {result.failures[0].reason}")
        for output in result.outputs:
            held = self._held[output.seq_id]
            held.num_computed = output.num_computed_tokens
            held.num_known += len(output.token_ids)
            self._tokens += len(output.token_ids)
            if output.finish_reason is not None:
                del self._held[output.seq_id]
                self._finished += 1
        self._free_blocks = result.free_blocks

    def _end(self) -> None:
        """Abort all sequences that are left; afterwards every block must be free."""
        self._apply_result(self._engine.step(StepPlan(self._steps, abort=tuple(self._held))))
        self._held.clear()
