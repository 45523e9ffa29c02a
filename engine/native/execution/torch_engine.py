"""Executes plans with torch, in order.

A step prepares sequences and blocks, runs the forward pass, samples tokens, and reports its result. There are two kinds
of steps. A step of async scheduling is launched, stays on the device while the next step is launched, and is finalized
later. Any other step is computed to its end at once. This module does not know tiers, deadlines, or the thread on which
it runs (`EngineThread`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from engine.grammar import CompiledGrammar
from engine.interface import (
    EngineInfo,
    SequenceFailure,
    SequenceOutput,
    StepEnd,
    StepPlan,
    StepResult,
)
from engine.native.batch.packing import pack_step
from engine.native.batch.sampled_tokens import SampledTokens, placeholder
from engine.native.execution.model_runner import ModelRunner
from engine.native.execution.oom_split import PiecewiseComputation, is_out_of_memory
from engine.native.execution.step import StepComputation
from engine.native.kv.swap import SwapSpace
from engine.native.sampling.pipeline import SamplingPipeline
from engine.sampling.sampler import DeviceSampler, Sampler, SamplingRow, sample, sample_ids
from engine.sampling.sequence_state import BROKEN_LOGITS
from engine.sequences.chunk import Chunk, Outcome, output_of
from engine.sequences.sequence_table import SequenceTable
from engine.suspension import StepDropped, Suspender


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A launched step that is not finalized yet. `tokens` has one row for each chunk in `sampled`."""

    step_id: int
    chunks: list[Chunk]
    sampled: tuple[Chunk, ...]
    tokens: SampledTokens
    started_s: float


class TorchEngine:
    """The native engine. It owns sequences, block tables, blocks and KV.

    All of these change only in `launch` and `finalize`.
    """

    def __init__(
        self,
        info: EngineInfo,
        runner: ModelRunner,
        swap: SwapSpace | None = None,
        *,
        sampler: Sampler = sample,
        device_sampler: DeviceSampler = sample_ids,
        prefix_cache: bool = True,
    ) -> None:
        self.info = info
        self._runner = runner
        self._swap = swap
        self._table = SequenceTable(info, prefix_cache=prefix_cache)
        self._in_flight: deque[InFlightStep] = deque()  # launched, not finalized; oldest first
        self._results: deque[StepResult] = deque()  # of finalized steps; oldest first
        self._finalized_s = 0.0  # time by `perf_counter` at which the newest step was finalized
        self._device_sampler = device_sampler
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._on_finished: Callable[[], None] = lambda: None
        self._suspender: Suspender | None = None
        self._begun_s = 0.0  # time by `perf_counter` at which the step computed at once began or was continued
        pipeline = SamplingPipeline(info, sampler)
        self.grammars = pipeline.grammars
        compute = StepComputation(info.block_size, runner, pipeline)
        self._compute_all = PiecewiseComputation(compute, runner.release_memory, info.block_size)

    @property
    def num_used_blocks(self) -> int:
        return self._table.pool.num_used

    @property
    def num_used_swap_blocks(self) -> int:
        return self._table.swap_pool.num_used

    def compile_grammar(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar, on any thread. Raises `GrammarError` if it does not compile."""
        return self.grammars.compile(grammar)

    def check_alive(self) -> None:
        """Do nothing: this process computes, and a step fails if it cannot."""

    def step(self, plan: StepPlan) -> StepResult:
        """Execute a plan to its end and return the result.

        Raises `PlanError` before anything changes. After any other error, the engine must not be used any more.
        """
        self.launch(plan)
        return self.finalize()

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Raises the same errors as `step`.

        If the step's tokens can stay on the device, return while the device computes the step; a plan with `ahead` may
        follow. Otherwise compute the step before returning.
        """
        started_s, begun = perf_counter(), self._runner.moment()
        if plan.ahead:
            plan = self._table.without_ended(plan)
        else:
            self._finalize_all()
        self._table.check(plan)
        chunks = self._table.begin(plan)
        self._copy_swapped()
        if not self._launch_step(plan, chunks, started_s, begun):
            self._compute_at_once(plan, chunks, started_s)

    @property
    def is_finished(self) -> bool:
        """True if `finalize` would return without waiting."""
        return bool(self._results) or (bool(self._in_flight) and self._in_flight[0].tokens.are_known)

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        """From now on, call `callback` whenever the device has finished a launched step, on the thread that waited."""
        self._on_finished = callback

    def finalize(self) -> StepResult:
        """Wait for the oldest launched step and return its result."""
        if not self._results:
            self._finalize_oldest()
        return self._results.popleft()

    def suspend_by(self, suspender: Suspender) -> None:
        """From now on, ask `suspender` between the layers of a step, if the engine suspends steps."""
        self._suspender = suspender

    def close(self) -> None:
        """End the thread that waits for the device; the memory is freed with the engine."""
        self._waiter.shutdown()

    def decode_replay(self, rows: int) -> Callable[[], None] | None:
        """Return a function that repeats the newest decode step of `rows` rows; None if no graph has that many."""
        return self._runner.decode_replay(rows)

    def _copy_swapped(self) -> None:
        if self._swap is not None and len(self._table.copies):
            self._swap.copy(self._table.copies)

    # -- steps of async scheduling: their tokens stay on the device until they are finalized -----------------------

    @torch.inference_mode()
    def _launch_step(
        self, plan: StepPlan, chunks: list[Chunk], started_s: float, begun: torch.cuda.Event | None
    ) -> bool:
        """Launch a step whose tokens can stay on the device, and return True.

        Return False, with nothing changed, if the step needs the host or does not fit into memory.
        """
        if not self.info.steps_ahead or not chunks or not all(_is_simple(chunk) for chunk in chunks):
            return False
        batch = pack_step(chunks, self.info.block_size)
        previous = self._in_flight[-1].tokens.ids if self._in_flight else None
        if previous is not None and not len(previous):
            previous = None  # no token is missing
        try:
            logits = self._runner.run(batch, previous)
            rows = [SamplingRow(c.sequence.sampling, c.sequence.num_output_tokens) for c in batch.sampled_chunks]
            ids = self._runner.no_ids if logits is None else self._device_sampler(logits, rows)
            tokens = SampledTokens(ids, self._waiter, begun)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        self._in_flight.append(InFlightStep(plan.step_id, chunks, batch.sampled_chunks, tokens, started_s))
        for chunk in chunks:
            if not chunk.samples:
                self._table.launch(chunk, None)
        for row, chunk in enumerate(batch.sampled_chunks):
            self._table.launch(chunk, placeholder(row))
        tokens.call_when_known(self._on_finished)
        return True

    def _finalize_all(self) -> None:
        while self._in_flight:
            self._finalize_oldest()

    def _finalize_oldest(self) -> None:
        """Wait for the oldest step and record its tokens."""
        step = self._in_flight.popleft()
        outcomes = {chunk.sequence.seq_id: Outcome() for chunk in step.chunks}
        for chunk, token_id in zip(step.sampled, step.tokens.wait(), strict=True):
            failure = BROKEN_LOGITS if token_id is None else None
            outcomes[chunk.sequence.seq_id] = Outcome(() if token_id is None else (token_id,), failure=failure)
        outputs, failures = self._table.finalize_all(step.chunks, outcomes)
        self._report(step.step_id, outputs, failures, step.started_s, device_s=step.tokens.device_s())

    # -- other steps: computed to their end at once ------------------------------------------------------------------

    def _compute_at_once(self, plan: StepPlan, chunks: list[Chunk], started_s: float) -> None:
        self._finalize_all()
        chunks = [chunk for chunk in chunks if self._table.holds(chunk.sequence)]
        self._begun_s = started_s
        suspends = self._suspender is not None and self.info.suspends_steps and not self._table.suspended
        self._runner.between_layers = partial(self._between_layers, plan.step_id, chunks) if suspends else None
        try:
            outcomes = self._compute_all(chunks) if chunks else {}
        except StepDropped:
            self._report(plan.step_id, self._table.drop_suspended(), (), perf_counter(), end=StepEnd.DROPPED)
            return
        outputs: list[SequenceOutput] = []
        failures: list[SequenceFailure] = []
        for chunk in chunks:
            seq_id = chunk.sequence.seq_id
            outcome = outcomes[seq_id]
            if outcome.failure is not None:
                self._table.free_broken(seq_id)
                failures.append(SequenceFailure(seq_id, outcome.failure))
            else:
                outputs.append(output_of(chunk, outcome, self._table.advance(chunk, outcome.token_ids)))
        self._report(plan.step_id, outputs, failures, self._begun_s)

    def _between_layers(self, step_id: int, chunks: list[Chunk]) -> None:
        """Suspend the step if that is due, and return when it goes on. Raises `StepDropped` if it is dropped."""
        assert self._suspender is not None
        if not self._suspender.is_due():
            return
        self._table.suspended = chunks
        self._report(step_id, (), (), self._begun_s, end=StepEnd.SUSPENDED)
        between_layers = self._runner.between_layers
        self._suspender.wait(self._results.pop())
        self._table.suspended, self._begun_s = [], perf_counter()
        self._runner.between_layers = between_layers

    def _report(
        self,
        step_id: int,
        outputs: Sequence[SequenceOutput],
        failures: Sequence[SequenceFailure],
        started_s: float,
        device_s: float | None = None,
        end: StepEnd = StepEnd.DONE,
    ) -> None:
        now_s = perf_counter()
        # The device computes the previous step first.
        busy_s = now_s - max(started_s, self._finalized_s) if device_s is None else device_s
        self._finalized_s = now_s
        self._results.append(
            StepResult(
                step_id=step_id,
                outputs=tuple(outputs),
                failures=tuple(failures),
                free_blocks=self._table.pool.num_free,
                elapsed_s=busy_s,
                free_swap_blocks=self._table.swap_pool.num_free,
                shared_blocks=self._table.pool.take_changes(),
                end=end,
            )
        )


def _is_simple(chunk: Chunk) -> bool:
    """Return whether the chunk can be computed and its token sampled without the host."""
    sequence = chunk.sequence
    return not (chunk.scored or sequence.alters_logits or sequence.sampling.logprobs is not None)
