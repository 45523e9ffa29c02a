"""Sequences that leave a running step: who is asked to, and what of the step stays when they do.

`EvictionRequest` is written by one thread and read by another, at every layer. Knows chunks and rows; not layers,
tensors, or why a sequence is to be evicted.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.interface import StepEviction
from engine.native.batch.packing import Ints, StepBatch, pack_step, rows_of
from engine.sequences.sequence_table import Chunk

_NOBODY: frozenset[str] = frozenset()


class StepEvicted(Exception):
    """All have left the running step: there is nothing to go on with."""


class EvictionRequest:
    """Tied to a step by its id, which is never given again: a wish may come before its step has begun, and after its
    end it counts for nothing."""

    def __init__(self) -> None:
        self._running: int | None = None
        self._wish: tuple[int, frozenset[str]] | None = None  # one object, so that both are read of one moment

    def ask(self, step_id: int, seq_ids: Collection[str]) -> None:
        """Besides whom was asked of this step before. Called by one thread, the owner of the steps."""
        before = self._wish
        others = before[1] if before is not None and before[0] == step_id else _NOBODY
        self._wish = (step_id, others.union(seq_ids))

    def begin(self, step_id: int) -> None:
        self._running = step_id

    def now(self) -> frozenset[str]:
        """Who is asked to leave the step begun last; the same object until somebody else is."""
        wish = self._wish
        return wish[1] if wish is not None and wish[0] == self._running else _NOBODY


@dataclass(frozen=True, slots=True)
class RemainingRows:
    """`rows` of the batch until now go on, in the order of `batch`, which is what is left."""

    rows: Ints
    batch: StepBatch


class RunningChunks:
    """The chunks that one forward pass computes. `wished` says at any time who is to leave."""

    def __init__(
        self, chunks: list[Chunk], block_size: int, step_eviction: StepEviction, wished: Callable[[], frozenset[str]]
    ) -> None:
        self.chunks = chunks  # that are still in it
        self.batch = pack_step(chunks, block_size)
        self._block_size = block_size
        self._step_eviction = step_eviction
        self._wished = wished
        self._heard = _NOBODY

    def evict(self) -> RemainingRows | None:
        """At a layer boundary: who is to leave, leaves; None where nobody does. Raises `StepEvicted`."""
        wished = self._wished()
        if wished is self._heard:
            return None
        self._heard = wished
        staying = [chunk for chunk in self.chunks if chunk.sequence.seq_id not in wished]
        if not staying:
            raise StepEvicted
        if len(staying) == len(self.chunks) or self._step_eviction is not StepEviction.ROWS:
            return None
        rows = rows_of(staying, self.chunks)
        self.chunks, self.batch = staying, pack_step(staying, self._block_size)
        return RemainingRows(rows, self.batch)
