"""Computes a step that does not fit in memory in pieces: the same plan, only slower.

Knows chunks and how to cut them; not how a chunk is computed. A piece that fits is computed once. A sequence fails only
if a single token of it does not fit; the others go on.
"""

from collections.abc import Callable
from dataclasses import replace

import structlog
import torch

from engine.native.sampling.outcome import Outcome
from engine.sequences.sequence_table import Chunk

Outcomes = dict[str, Outcome]  # by sequence id

_TOO_LARGE = Outcome(failure="not enough memory to compute a single token of it")
# Parts of the messages of torch and of the libraries below it where they do not raise `OutOfMemoryError`.
_OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "_ALLOC_FAILED",
)


class PiecewiseComputation:
    """`compute` computes the chunks of a step, may be called again for any of them, and raises if memory runs out;
    `release` then frees unused memory."""

    def __init__(
        self, compute: Callable[[list[Chunk]], Outcomes], release: Callable[[], None], block_size: int
    ) -> None:
        self._compute = compute
        self._release = release
        self._block_size = block_size

    def __call__(self, chunks: list[Chunk]) -> Outcomes:
        """Compute all chunks. Raises errors of `compute` other than running out of memory."""
        outcomes = self._attempt(chunks)
        if outcomes is None:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            structlog.get_logger(__name__).warning(
                "out of memory: the step is computed in pieces", chunks=len(chunks), tokens=num_tokens
            )
            outcomes = self._in_halves(chunks)
        return outcomes

    def _attempt(self, chunks: list[Chunk]) -> Outcomes | None:
        """Return None if the chunks do not fit. The error is freed by then, and with it the tensors that it held."""
        try:
            return self._compute(chunks)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _in_halves(self, chunks: list[Chunk]) -> Outcomes:
        """Compute chunks that do not fit together."""
        self._release()
        if len(chunks) > 1:
            middle = len(chunks) // 2
            return self._piece(chunks[:middle]) | self._piece(chunks[middle:])
        (chunk,) = chunks
        seq_id = chunk.sequence.seq_id
        if chunk.num_tokens == 1:
            return {seq_id: _TOO_LARGE}
        earlier, later = cut(chunk, self._block_size)
        outcome = self._piece([earlier])[seq_id]
        if outcome.is_computed:
            outcome = outcome.then(self._piece([later])[seq_id])
        return {seq_id: outcome}

    def _piece(self, chunks: list[Chunk]) -> Outcomes:
        outcomes = self._attempt(chunks)
        return self._in_halves(chunks) if outcomes is None else outcomes


def cut(chunk: Chunk, block_size: int) -> tuple[Chunk, Chunk]:
    """Return two chunks of about half the tokens each. If they share a block that is new to the sequence, the earlier
    chunk clears it: for the later one it holds keys and values."""
    num_earlier = chunk.num_tokens // 2
    middle = chunk.start + num_earlier
    shared = chunk.sequence.block_table[middle // block_size] if middle % block_size else None
    is_new = middle // block_size * block_size >= chunk.start
    earlier = replace(chunk, num_tokens=num_earlier, unfilled_block=shared if is_new else None)
    unfilled = None if chunk.unfilled_block == shared else chunk.unfilled_block
    return earlier, replace(chunk, start=middle, num_tokens=chunk.num_tokens - num_earlier, unfilled_block=unfilled)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that memory ran out; torch's CPU allocator raises a plain `RuntimeError` then."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
