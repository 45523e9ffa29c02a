"""Computes the chunks of a step: the forward pass, sampling, and the log probabilities of prompt tokens.

Knows rows, logits and outcomes; does not know the table of sequences. A computation keeps no state: it may be repeated
for the same chunks or for some of them.
"""

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from engine.interface import TokenLogprobs
from engine.native.batch.packing import pack_step
from engine.native.execution.model_runner import ModelRunner
from engine.native.execution.oom_split import Outcomes
from engine.native.sampling.logprobs import token_logprobs
from engine.native.sampling.pipeline import SamplingPipeline
from engine.sequences.chunk import Chunk, Outcome


class StepComputation:
    """The computation of chunks; call it with the chunks of a step."""

    def __init__(self, block_size: int, runner: ModelRunner, pipeline: SamplingPipeline) -> None:
        self._block_size = block_size
        self._runner = runner
        self._pipeline = pipeline

    @torch.inference_mode()
    def __call__(self, chunks: list[Chunk]) -> Outcomes:
        batch = pack_step(chunks, self._block_size)
        outcomes = {chunk.sequence.seq_id: Outcome() for chunk in chunks}
        logits = self._runner.run(batch)
        if logits is None:
            self._runner.synchronize()
            return outcomes
        num_rows = [1 + len(chunk.draft) for chunk in batch.sampled_chunks]
        num_sampled = sum(num_rows)
        if num_sampled:
            sequences = [chunk.sequence for chunk in batch.sampled_chunks for _ in range(1 + len(chunk.draft))]
            ahead = [later for count in num_rows for later in range(count)]
            chosen = iter(self._pipeline.sample(logits[:num_sampled], sequences, ahead))
            for chunk, count in zip(batch.sampled_chunks, num_rows, strict=True):
                outcomes[chunk.sequence.seq_id] = chunk.verified(list(islice(chosen, count)))
        for chunk, found in _score_prompts(logits[num_sampled:], batch.scored_chunks):
            seq_id = chunk.sequence.seq_id
            outcomes[seq_id] = replace(outcomes[seq_id], prompt_logprobs=found)
        return outcomes


def _score_prompts(logits: Tensor, chunks: tuple[Chunk, ...]) -> list[tuple[Chunk, tuple[TokenLogprobs, ...]]]:
    """Return each chunk together with the log probabilities of the prompt tokens that it scores.

    `logits` has one row for each of these tokens, in the order of the chunks.
    """
    scored = []
    first = 0
    for chunk in chunks:
        tokens = chunk.sequence.token_ids[chunk.scored.start : chunk.scored.stop].tolist()
        num_top = chunk.sequence.sampling.prompt_logprobs or 0
        rows = logits[first : first + len(tokens)]
        scored.append((chunk, tuple(token_logprobs(rows, tokens, [num_top] * len(tokens)))))
        first += len(tokens)
    return scored
