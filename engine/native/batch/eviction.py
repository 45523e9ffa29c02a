"""Mid-step eviction: the sequences to evict from a running step, and the rows of the step that remain.

One thread writes an `EvictionRequest`; another thread reads it once per layer. Knows chunks and rows; does not know
layers, tensors, or why a sequence is evicted.
"""

from collections.abc import Callable, Collection

from engine.interface import StepEviction
from engine.native.batch.packing import Ints, pack_step, rows_of
from engine.sequences.chunk import Chunk

_NO_EVICTEES: frozenset[str] = frozenset()


class StepEvicted(Exception):
    """The exception of a step from which all sequences were evicted: nothing is left to compute."""


class EvictionRequest:
    """The sequences to evict from one step.

    A request may arrive before its step begins. A request that arrives after the end of its step has no effect, because
    step ids are never reused.
    """

    def __init__(self) -> None:
        self._running_step_id: int | None = None
        # The step id and the evictees are in one tuple, so that a reader never mixes two requests.
        self._requested: tuple[int, frozenset[str]] | None = None

    def request(self, step_id: int, seq_ids: Collection[str]) -> None:
        """Add `seq_ids` to the sequences to evict from step `step_id`. Call this from one thread only."""
        before = self._requested
        others = before[1] if before is not None and before[0] == step_id else _NO_EVICTEES
        self._requested = (step_id, others.union(seq_ids))

    def begin(self, step_id: int) -> None:
        """Record that the step `step_id` is the running step from now on."""
        self._running_step_id = step_id

    def evictees(self) -> frozenset[str]:
        """Return the sequences to evict from the running step.

        The same object is returned until the request grows.
        """
        requested = self._requested
        if requested is None or requested[0] != self._running_step_id:
            return _NO_EVICTEES
        return requested[1]


class RunningChunks:
    """The chunks that one forward pass computes.

    `evictees` returns the sequences to evict; it may be called at any time.
    """

    def __init__(
        self, chunks: list[Chunk], block_size: int, step_eviction: StepEviction, evictees: Callable[[], frozenset[str]]
    ) -> None:
        self.chunks = chunks  # without the chunks of evicted sequences
        self.batch = pack_step(chunks, block_size)
        self._block_size = block_size
        self._step_eviction = step_eviction
        self._evictees = evictees
        self._handled = _NO_EVICTEES

    def evict(self) -> Ints | None:
        """Evict the requested sequences. Call this at each layer boundary.

        Return for each row of the new `batch` its row number before; None if the batch does not change. Raises
        `StepEvicted` if no sequence remains.
        """
        evictees = self._evictees()
        if evictees is self._handled:
            return None
        self._handled = evictees
        remaining = [chunk for chunk in self.chunks if chunk.sequence.seq_id not in evictees]
        if not remaining:
            raise StepEvicted
        if len(remaining) == len(self.chunks) or self._step_eviction is not StepEviction.ROWS:
            return None
        rows = rows_of(remaining, self.chunks)
        self.chunks, self.batch = remaining, pack_step(remaining, self._block_size)
        return rows
