"""Executes plans with torch, one at a time and to the end.

Knows the order of a step: sequences and blocks, forward pass, sampling, outcome. It knows neither tiers nor
time, and not the thread that it runs on (`EngineThread`'s matter).
"""

from time import perf_counter

import torch

from engine.interface import EngineInfo, SequenceFailure, SequenceOutput, StepPlan, StepResult
from engine.model_runner import ModelRunner
from engine.sampler import SamplingRow, sample
from engine.sequence_table import Chunk, SequenceTable
from engine.step_batch import pack_step

_BROKEN_LOGITS = "the model's logits are not finite"


class TorchEngine:
    """Owns sequences, block tables, blocks and KV; all of them change in `step` only."""

    def __init__(self, info: EngineInfo, runner: ModelRunner) -> None:
        self._info = info
        self._runner = runner
        self._table = SequenceTable(info)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def num_free_blocks(self) -> int:
        return self._table.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self._table.pool.num_used

    def step(self, plan: StepPlan) -> StepResult:
        """Raises `PlanError` before anything is changed; whatever else it raises is the engine's end."""
        started = perf_counter()
        self._table.check(plan)
        chunks = self._table.begin(plan)
        sampled = self._compute(chunks) if chunks else {}
        outputs: list[SequenceOutput] = []
        failures: list[SequenceFailure] = []
        for chunk in chunks:
            seq_id = chunk.sequence.seq_id
            if chunk.samples and sampled[seq_id] is None:
                self._table.remove(seq_id)
                failures.append(SequenceFailure(seq_id, _BROKEN_LOGITS))
            else:
                outputs.append(self._advance(chunk, sampled.get(seq_id)))
        return StepResult(plan.step_id, tuple(outputs), tuple(failures), self.num_free_blocks, perf_counter() - started)

    def close(self) -> None:
        """Nothing to hand back: memory goes with the engine."""

    @torch.inference_mode()
    def _compute(self, chunks: list[Chunk]) -> dict[str, int | None]:
        """The new token, by sequence, of the chunks that sample; None where the logits are broken."""
        batch = pack_step(chunks, self._info.block_size)
        logits = self._runner.run(batch)
        if logits is None:
            self._runner.synchronize()
            return {}
        sequences = [chunk.sequence for chunk in batch.sampled_chunks]
        tokens = sample(logits, [SamplingRow(s.sampling, s.num_output_tokens) for s in sequences])
        return {s.seq_id: token for s, token in zip(sequences, tokens, strict=True)}

    def _advance(self, chunk: Chunk, token_id: int | None) -> SequenceOutput:
        reason = self._table.advance(chunk, token_id)
        return SequenceOutput(
            seq_id=chunk.sequence.seq_id,
            num_computed_tokens=chunk.end,
            token_ids=() if token_id is None else (token_id,),
            finish_reason=reason,
        )
