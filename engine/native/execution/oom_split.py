"""Computes a step in smaller pieces if it does not fit into memory: the plan is the same, only slower.

Knows chunks and how to cut them; does not know how a chunk is computed. A piece that fits is computed once. A sequence
fails only if a single token of it does not fit; the other sequences continue.
"""

from collections.abc import Callable
from dataclasses import replace

import structlog
import torch

from engine.sequences.chunk import Chunk, Outcome

Outcomes = dict[str, Outcome]  # by sequence id

_TOO_LARGE = Outcome(failure="not enough memory to compute a single token of it")
# Parts of the messages with which libraries report that memory ran out in a plain `RuntimeError`: CUDA and Triton,
# cuBLAS and cuDNN, and CPU allocators. cuBLAS cannot make its handle where memory is short.
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
)


class PiecewiseComputation:
    """A computation of the chunks of a step that cuts the step into pieces if memory runs out.

    `compute` computes chunks and raises an error if memory runs out. It may be called again for the same chunks.
    `release` is called after such an error, and frees unused memory.
    """

    def __init__(
        self, compute: Callable[[list[Chunk]], Outcomes], release: Callable[[], None], block_size: int
    ) -> None:
        self._compute = compute
        self._release = release
        self._block_size = block_size

    def __call__(self, chunks: list[Chunk]) -> Outcomes:
        """Compute all chunks. Raises every error of `compute` except an out-of-memory error."""
        outcomes = self._attempt(chunks)
        if outcomes is None:
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            structlog.get_logger(__name__).warning(
                "out of memory: the step is computed in pieces", chunks=len(chunks), tokens=num_tokens
            )
            outcomes = self._in_halves(chunks)
        return outcomes

    def _attempt(self, chunks: list[Chunk]) -> Outcomes | None:
        """Compute the chunks; return None if they do not fit into memory.

        In that case, the error and the tensors that it referenced have been freed when this method returns.
        """
        try:
            return self._compute(chunks)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _in_halves(self, chunks: list[Chunk]) -> Outcomes:
        """Compute chunks that are too large for memory in one pass, in two halves.

        Several chunks are divided into two lists; a single chunk is cut into two chunks.
        """
        self._release()
        if len(chunks) > 1:
            middle = len(chunks) // 2
            return self._piece(chunks[:middle]) | self._piece(chunks[middle:])
        (chunk,) = chunks
        seq_id = chunk.sequence.seq_id
        if chunk.draft:
            return self._piece([without_draft(chunk, self._block_size)])
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
    """Cut a chunk into two chunks of about half the tokens each.

    If both chunks use a block that is new to the sequence, only the earlier chunk clears the block: when the later
    chunk runs, the block already holds keys and values.
    """
    num_earlier = chunk.num_tokens // 2
    middle = chunk.start + num_earlier
    shared = chunk.sequence.block_table[middle // block_size] if middle % block_size else None
    is_new = middle // block_size * block_size >= chunk.start
    earlier = replace(chunk, num_tokens=num_earlier, unfilled_block=shared if is_new else None)
    unfilled = None if chunk.unfilled_block == shared else chunk.unfilled_block
    return earlier, replace(chunk, start=middle, num_tokens=chunk.num_tokens - num_earlier, unfilled_block=unfilled)


def without_draft(chunk: Chunk, block_size: int) -> Chunk:
    """Return a decode without its draft. Its block, if it is new, is not filled by the draft then."""
    block, offset = divmod(chunk.start, block_size)
    return replace(chunk, draft=(), unfilled_block=None if offset else chunk.sequence.block_table[block])


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that memory ran out.

    torch's CPU allocator raises a plain `RuntimeError` in this case, which is recognised by its message.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
