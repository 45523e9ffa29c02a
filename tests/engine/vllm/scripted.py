"""An executor in place of vLLM's, which samples by a function."""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from engine.grammar import Bits
from engine.modeled.engine import modeled_token
from engine.sequences.chunk import Chunk, Outcome
from engine.vllm.batch import Batch

VOCAB_SIZE = 97  # of the tokens that `modeled` samples

Sample = Callable[[Chunk, Bits | None], Outcome]


def modeled(chunk: Chunk, mask: Bits | None) -> Outcome:
    """Sample what the modeled engine would; under a mask, the first token that it allows."""
    if not chunk.samples:
        return Outcome()
    if mask is not None:
        return Outcome((int(np.unpackbits(mask.view(np.uint8), bitorder="little").argmax()),))
    sequence = chunk.sequence
    return Outcome((modeled_token(sequence.sampling.seed, chunk.end - sequence.num_prompt_tokens, VOCAB_SIZE),))


class ScriptedExecutor:
    """Computes a batch at once, or only when `release` is called if `holds` is set. Implements `BatchExecutor`."""

    def __init__(self, sample: Sample = modeled, max_num_seqs: int = 16) -> None:
        self.max_num_seqs = max_num_seqs
        self.batches: list[Batch] = []
        self.holds = False
        self.death: Exception | None = None
        self.is_closed = False
        self._sample = sample
        self._held: list[tuple[Future[dict[str, Outcome]], dict[str, Outcome]]] = []

    def start(self, batch: Batch) -> Future[dict[str, Outcome]]:
        self.batches.append(batch)
        future: Future[dict[str, Outcome]] = Future()
        self._held.append(
            (future, {c.sequence.seq_id: self._sample(c, batch.masks.get(c.sequence.seq_id)) for c in batch.chunks})
        )
        if not self.holds:
            self.release()
        return future

    def release(self) -> None:
        for future, sampled in self._held:
            future.set_exception(self.death) if self.death else future.set_result(sampled)
        self._held.clear()

    def check_alive(self) -> None:
        if self.death is not None:
            raise self.death

    def close(self) -> None:
        self.is_closed = True
