"""Executes plans with torch, one at a time and to the end.

Knows the order of a step: sequences and blocks, forward pass, the choice of tokens, outcome. It knows neither tiers
nor time, and not the thread that it runs on (`EngineThread`'s matter).
"""

from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from engine.interface import EngineInfo, SequenceFailure, SequenceOutput, StepPlan, StepResult, TokenLogprobs
from engine.logprobs import token_logprobs
from engine.model_runner import ModelRunner
from engine.outcome import Outcome
from engine.piecewise import Outcomes, PiecewiseComputation
from engine.sampler import Sampler, sample
from engine.sequence_table import Chunk, SequenceTable
from engine.step_batch import pack_step
from engine.swap_space import SwapSpace
from engine.token_chooser import TokenChooser


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
        self._chooser = TokenChooser(info, sampler)
        self._compute_all = PiecewiseComputation(self._compute, runner.release_memory, info.block_size)

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
        started = perf_counter()
        self._table.check(plan)
        chunks = self._table.begin(plan)
        self._copy_swapped()
        outcomes = self._compute_all(chunks) if chunks else {}
        outputs: list[SequenceOutput] = []
        failures: list[SequenceFailure] = []
        for chunk in chunks:
            outcome = outcomes[chunk.sequence.seq_id]
            if outcome.failure is not None:
                self._table.discard(chunk.sequence.seq_id)
                failures.append(SequenceFailure(chunk.sequence.seq_id, outcome.failure))
            else:
                outputs.append(self._advance(chunk, outcome))
        return StepResult(
            step_id=plan.step_id,
            outputs=tuple(outputs),
            failures=tuple(failures),
            free_blocks=self.num_free_blocks,
            elapsed_s=perf_counter() - started,
            free_swap_blocks=self._table.swap_pool.num_free,
            shared_blocks=self._table.pool.take_changes(),
        )

    def close(self) -> None:
        """Nothing to hand back: memory goes with the engine."""

    def _copy_swapped(self) -> None:
        if self._swap is not None and len(self._table.copies):
            self._swap.copy(self._table.copies)

    @torch.inference_mode()
    def _compute(self, chunks: list[Chunk]) -> Outcomes:
        """May be called again for the same chunks: until `_advance`, nothing of it is remembered."""
        batch = pack_step(chunks, self._info.block_size)
        logits = self._runner.run(batch)
        outcomes = {chunk.sequence.seq_id: Outcome() for chunk in chunks}
        if logits is None:
            self._runner.synchronize()
            return outcomes
        num_sampled = len(batch.sampled_chunks)
        if num_sampled:
            sequences = [chunk.sequence for chunk in batch.sampled_chunks]
            chosen = self._chooser.choose(logits[:num_sampled], sequences)
            outcomes.update(zip((s.seq_id for s in sequences), chosen, strict=True))
        for chunk, found in _score_prompts(logits[num_sampled:], batch.scored_chunks):
            seq_id = chunk.sequence.seq_id
            outcomes[seq_id] = replace(outcomes[seq_id], prompt_logprobs=found)
        return outcomes

    def _advance(self, chunk: Chunk, outcome: Outcome) -> SequenceOutput:
        reason = self._table.advance(chunk, outcome.token_id)
        return SequenceOutput(
            seq_id=chunk.sequence.seq_id,
            num_computed_tokens=chunk.end,
            token_ids=() if outcome.token_id is None else (outcome.token_id,),
            finish_reason=reason,
            num_cached_tokens=chunk.num_cached,
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
        )


def _score_prompts(logits: Tensor, chunks: tuple[Chunk, ...]) -> list[tuple[Chunk, tuple[TokenLogprobs, ...]]]:
    """What `logits`, a row for each prompt token that the chunks score, make of these tokens."""
    scored = []
    first = 0
    for chunk in chunks:
        tokens = chunk.sequence.token_ids[chunk.scored.start : chunk.scored.stop].tolist()
        num_top = chunk.sequence.sampling.prompt_logprobs or 0
        rows = logits[first : first + len(tokens)]
        scored.append((chunk, tuple(token_logprobs(rows, tokens, [num_top] * len(tokens)))))
        first += len(tokens)
    return scored
