"""Executes plans with torch, in order.

Knows the order of a step (sequences and blocks, forward pass, the choice of tokens, outcome), and which steps may stay
on the device while the next is begun. It knows neither tiers nor time, and not the thread that it runs on
(`EngineThread`'s matter).
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from engine.interface import (
    EngineInfo,
    FinishReason,
    SequenceFailure,
    SequenceOutput,
    StepPlan,
    StepResult,
)
from engine.native.batch.eviction import EvictionRequest
from engine.native.batch.packing import pack_step
from engine.native.batch.sampled_tokens import SampledTokens, place_holder
from engine.native.execution.model_runner import ModelRunner
from engine.native.execution.oom_split import PiecewiseComputation, is_out_of_memory
from engine.native.execution.step import StepComputation
from engine.native.kv.swap import SwapSpace
from engine.native.sampling.outcome import Outcome
from engine.native.sampling.pipeline import BROKEN_LOGITS, SamplingPipeline
from engine.native.sampling.sampler import Sampler, SamplingRow, sample, sample_ids
from engine.sequences.sequence_table import Chunk, SequenceTable


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step on the device. `tokens` has a row for each of the `sampled` chunks."""

    step_id: int
    chunks: list[Chunk]
    sampled: tuple[Chunk, ...]
    tokens: SampledTokens
    started_s: float


class TorchEngine:
    """Owns sequences, block tables, blocks and KV; all of them change in `step` only."""

    def __init__(
        self,
        info: EngineInfo,
        runner: ModelRunner,
        swap: SwapSpace | None = None,
        *,
        sampler: Sampler = sample,
        prefix_cache: bool = True,
    ) -> None:
        self._info = info
        self._runner = runner
        self._swap = swap
        self._table = SequenceTable(info, prefix_cache=prefix_cache)
        self._in_flight: deque[_InFlightStep] = deque()  # launched; the device may still be at them
        self._results: deque[StepResult] = deque()  # of steps that have ended
        self._landed_s = 0.0
        self._wishes = EvictionRequest()
        compute = StepComputation(info, runner, SamplingPipeline(info, sampler), self._wishes.now)
        self._compute_all = PiecewiseComputation(compute, runner.release_memory, info.block_size)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def num_free_blocks(self) -> int:
        return self._table.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self._table.pool.num_used

    @property
    def num_used_swap_blocks(self) -> int:
        return self._table.swap_pool.num_used

    def step(self, plan: StepPlan) -> StepResult:
        """Raises `PlanError` before anything is changed; whatever else it raises is the engine's end."""
        self.launch(plan)
        return self.settle()

    def launch(self, plan: StepPlan) -> None:
        """Begin a step. Where its tokens can stay on the device this returns while it is computed, and a plan made
        ahead may follow. Raises as `step` does."""
        started_s = perf_counter()
        if plan.ahead:
            plan = replace(plan, run=tuple(run for run in plan.run if run.seq_id in self._table))
        else:
            self._land_all()
        self._table.check(plan)
        chunks = self._table.begin(plan)
        self._copy_swapped()
        if not self._launch_step(plan, chunks, started_s):
            self._compute_at_once(plan, chunks, started_s)

    @property
    def is_settled(self) -> bool:
        """`settle` would not wait."""
        return bool(self._results) or (bool(self._in_flight) and self._in_flight[0].tokens.are_known)

    def settle(self) -> StepResult:
        """The outcome of the oldest step that was launched, when it is there."""
        if not self._results:
            self._land()
        return self._results.popleft()

    def evict(self, step_id: int, seq_ids: Collection[str]) -> None:
        """Evict these sequences from that step at its next layer, as far as `info.step_eviction` says. Call it from any
        one thread, before the step begins or while it runs; afterwards it has no effect."""
        self._wishes.ask(step_id, seq_ids)

    def close(self) -> None:
        """Nothing to hand back: memory goes with the engine."""

    def _copy_swapped(self) -> None:
        if self._swap is not None and len(self._table.copies):
            self._swap.copy(self._table.copies)

    # -- steps whose tokens stay on the device until they are asked for ------------------------------------------

    @torch.inference_mode()
    def _launch_step(self, plan: StepPlan, chunks: list[Chunk], started_s: float) -> bool:
        """False: this step is none of them, or there is no memory for it; nothing was done."""
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        if not self._info.steps_ahead or not sequences or not all(_is_simple(chunk) for chunk in chunks):
            return False
        batch = pack_step(chunks, self._info.block_size)
        previous = self._in_flight[-1].tokens.ids if self._in_flight else None
        try:
            logits = self._runner.run(batch, previous)
            assert logits is not None
            rows = [SamplingRow(c.sequence.sampling, c.sequence.num_output_tokens) for c in batch.sampled_chunks]
            tokens = SampledTokens(sample_ids(logits, rows))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        self._in_flight.append(_InFlightStep(plan.step_id, chunks, batch.sampled_chunks, tokens, started_s))
        for chunk in chunks:
            if not chunk.samples:
                self._table.launch(chunk, None)
        for row, chunk in enumerate(batch.sampled_chunks):
            self._table.launch(chunk, place_holder(row))
        return True

    def _land_all(self) -> None:
        while self._in_flight:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest step and take its tokens in. What another step did for sequences that ended in one before
        it counts for nothing."""
        flight = self._in_flight.popleft()
        sampled = {c.sequence.seq_id: t for c, t in zip(flight.sampled, flight.tokens.wait(), strict=True)}
        outputs: list[SequenceOutput] = []
        failures: list[SequenceFailure] = []
        for chunk in flight.chunks:
            seq_id = chunk.sequence.seq_id
            if not self._table.holds(chunk.sequence):
                continue
            token_id = sampled.get(seq_id)
            if seq_id in sampled and token_id is None:
                self._table.discard(seq_id)
                failures.append(SequenceFailure(seq_id, BROKEN_LOGITS))
            else:
                reason = self._table.land(chunk, token_id)
                outputs.append(_output(chunk, Outcome(token_id), reason))
        self._report(flight.step_id, outputs, failures, flight.started_s)

    # -- steps that are computed to their end at once ----------------------------------------------------------

    def _compute_at_once(self, plan: StepPlan, chunks: list[Chunk], started_s: float) -> None:
        self._land_all()
        chunks = [chunk for chunk in chunks if self._table.holds(chunk.sequence)]
        self._wishes.begin(plan.step_id)
        outcomes = self._compute_all(chunks) if chunks else {}
        outputs: list[SequenceOutput] = []
        failures: list[SequenceFailure] = []
        evicted: list[str] = []
        for chunk in chunks:
            seq_id = chunk.sequence.seq_id
            outcome = outcomes[seq_id]
            if outcome.failure is not None:
                self._table.discard(seq_id)
                failures.append(SequenceFailure(seq_id, outcome.failure))
            elif outcome.is_evicted:
                self._table.leave(chunk)
                outputs.append(SequenceOutput(seq_id, chunk.start, num_cached_tokens=chunk.num_cached))
                evicted.append(seq_id)
            else:
                outputs.append(_output(chunk, outcome, self._table.advance(chunk, outcome.token_id)))
        self._report(plan.step_id, outputs, failures, started_s, tuple(evicted))

    def _report(
        self,
        step_id: int,
        outputs: list[SequenceOutput],
        failures: list[SequenceFailure],
        started_s: float,
        evicted: tuple[str, ...] = (),
    ) -> None:
        now_s = perf_counter()
        busy_s = now_s - max(started_s, self._landed_s)  # a step made ahead waits for the one before it
        self._landed_s = now_s
        self._results.append(
            StepResult(
                step_id=step_id,
                outputs=tuple(outputs),
                failures=tuple(failures),
                free_blocks=self.num_free_blocks,
                elapsed_s=busy_s,
                free_swap_blocks=self._table.swap_pool.num_free,
                shared_blocks=self._table.pool.take_changes(),
                evicted=evicted,
            )
        )


def _is_simple(chunk: Chunk) -> bool:
    """Nothing that its next token depends on, or that is reported of it, needs the host."""
    sequence = chunk.sequence
    return not (chunk.scored or sequence.alters_logits or sequence.sampling.logprobs is not None)


def _output(chunk: Chunk, outcome: Outcome, reason: FinishReason | None) -> SequenceOutput:
    return SequenceOutput(
        seq_id=chunk.sequence.seq_id,
        num_computed_tokens=chunk.end,
        token_ids=() if outcome.token_id is None else (outcome.token_id,),
        finish_reason=reason,
        num_cached_tokens=chunk.num_cached,
        logprobs=outcome.logprobs,
        prompt_logprobs=outcome.prompt_logprobs,
    )
