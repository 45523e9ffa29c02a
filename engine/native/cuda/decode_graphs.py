"""Decode steps as captured graphs: hundreds of launches for the price of one.

Knows a step of one token a row, how to bring it to one of a few sizes, and where its numbers lie; not the model that
`compute` runs, and not what a graph is made of (`Graph`).

The numbers of a step lie in one tensor, a line for each row, which every graph reads:

    token id | position | slot | context length | block table ...

A step that is smaller than its graph is filled up with rows of no context, which write to the cache's last block:
nobody else's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.native.batch.packing import StepBatch
from engine.native.batch.sampled_tokens import fill_in
from engine.native.batch.tensors import DecodeTensors, StepTensors
from engine.native.cuda.pinned_ring import PinnedRing
from engine.native.kv.cache import KVCache

_MAX_ROWS = 256
_TOKEN, _POSITION, _SLOT, _CONTEXT, _TABLE = range(5)  # columns
_TOLERANCE = 0.02  # of logits, by their largest

Compute = Callable[[StepTensors, Tensor], Tensor]


class Graph(Protocol):
    """Does again what a function did, with the tensors that it used then."""

    def capture(self, function: Callable[[], object]) -> None:
        """Raises whatever the function or the device has against it."""
        ...

    def replay(self) -> None: ...


class CaptureFailure(Exception):
    """The graphs cannot be used; the message says why."""


def bucket_sizes(max_rows: int) -> list[int]:
    """Ascending; the last is `max_rows`, or the largest that is worth a graph."""
    max_rows = min(max_rows, _MAX_ROWS)
    return [size for size in (1, 2, 4, *range(8, _MAX_ROWS + 1, 8)) if size < max_rows] + [max_rows]


def _capture_order(sizes: Sequence[int]) -> list[int]:
    """The largest first: it can do every step, and the others find the memory that it took. Then powers of 2, so that
    no step is more than doubled, then those between."""
    return sorted(sizes, key=lambda size: (size != max(sizes), size & (size - 1) != 0, -size))


class DecodeGraphs:
    """`compute` gives the logits of some rows of a step; `cache` has one block that the pool never hands out, its
    last. `max_blocks`: of one sequence. `ring`: for these graphs alone."""

    def __init__(
        self, compute: Compute, cache: KVCache, sizes: Sequence[int], max_blocks: int, ring: PinnedRing
    ) -> None:
        self._compute = compute
        self._cache = cache
        self._sizes = sorted(sizes)
        self._ring = ring
        device = cache.layers[0].slots.device
        self._scratch = cache.num_blocks - 1
        self._rows = torch.zeros(self._sizes[-1], _TABLE + max_blocks, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(self._sizes[-1], device=device)
        self._logits: Tensor | None = None
        self._graphs: dict[int, Graph] = {}

    @property
    def captured_sizes(self) -> list[int]:
        return sorted(self._graphs)

    @torch.inference_mode()
    def capture(self, make_graph: Callable[[], Graph], has_room: Callable[[], bool], limit_s: float) -> None:
        """As many as can be had in about `limit_s` seconds and while `has_room`; a step takes the smallest that it fits
        in. The engine must be without sequences. Raises `CaptureFailure` for a graph that does not do what it was
        captured from, and whatever capturing raises."""
        started = perf_counter()
        for size in _capture_order(self._sizes):
            if self._graphs and (perf_counter() - started > limit_s or not has_room()):
                return
            self._fill_for_trial(size)
            self._compute_rows(size)  # the first time compiles kernels and makes workspaces, which a capture must not
            expected = self._logits_of(size).clone()
            graph = make_graph()
            graph.capture(partial(self._compute_rows, size))
            self._logits_of(size).zero_()
            graph.replay()
            error = (self._logits_of(size) - expected).abs().max()
            if not bool(error <= _TOLERANCE * expected.abs().max()):
                raise CaptureFailure(f"the graph of {size} rows gives other logits than its model")
            self._graphs[size] = graph

    @torch.inference_mode()
    def run(self, batch: StepBatch, previous: Tensor | None = None) -> Tensor | None:
        """Logits of all rows, (rows, vocab), as they are until the next call; None for a step that no graph does.
        `previous`: the ids that place holders among the batch's tokens stand for."""
        size = None if batch.prefill_chunks else self._fitting_size(batch.num_rows)
        if size is None:
            return None
        self._fill(batch, size)
        if previous is not None:
            token_ids = self._rows[: batch.num_rows, _TOKEN]
            token_ids.copy_(fill_in(token_ids, previous))
        self._graphs[size].replay()
        return self._logits_of(batch.num_rows)

    def _fitting_size(self, num_rows: int) -> int | None:
        return next((size for size in self.captured_sizes if size >= num_rows), None)

    def _compute_rows(self, size: int) -> None:
        """What a graph is captured from: everything that depends on a step's numbers is made of them in here."""
        columns = [self._rows[:size, column].contiguous() for column in range(_TABLE)]
        group = DecodeTensors(0, self._rows[:size, _TABLE:], columns[_CONTEXT], self._cache.num_blocks)
        num_slots = self._cache.num_blocks * self._cache.block_size
        step = StepTensors(columns[_TOKEN], columns[_POSITION], columns[_SLOT], num_slots, [group])
        logits = self._compute(step, self._all_rows[:size])
        if self._logits is None:
            self._logits = torch.empty(self._sizes[-1], logits.shape[1], dtype=logits.dtype, device=logits.device)
        self._logits_of(size).copy_(logits)

    def _logits_of(self, size: int) -> Tensor:
        if self._logits is None:
            raise RuntimeError("no step was computed yet")
        return self._logits[:size]

    def _fill(self, batch: StepBatch, size: int) -> None:
        """What block tables hold behind a context's end is never looked at."""
        buffer = self._next_lines(size)
        lines = buffer.numpy()
        own = lines[: batch.num_rows]
        own[:, _TOKEN], own[:, _POSITION], own[:, _SLOT] = batch.token_ids, batch.positions, batch.slots
        for group in batch.decode_groups:
            rows = own[group.first_row : group.first_row + group.num_rows]
            rows[:, _CONTEXT] = group.context_lens
            rows[:, _TABLE : _TABLE + group.block_table.shape[1]] = group.block_table
        lines[batch.num_rows :, : _TABLE + 1] = (0, 0, self._scratch * self._cache.block_size, 0, self._scratch)
        self._send(buffer)

    def _fill_for_trial(self, size: int) -> None:
        """Rows that see only themselves, each in a block of its own as far as there are any."""
        buffer = self._next_lines(size)
        lines, blocks = buffer.numpy(), np.arange(size) % self._cache.num_blocks
        lines[:, _TOKEN], lines[:, _POSITION], lines[:, _CONTEXT] = np.arange(size) % 7 + 1, 0, 1
        lines[:, _SLOT], lines[:, _TABLE] = blocks * self._cache.block_size, blocks
        self._send(buffer)

    def _next_lines(self, size: int) -> Tensor:
        """(size, columns) on the host."""
        return self._ring.next_buffer(size * self._rows.shape[1]).view(size, -1)

    def _send(self, lines: Tensor) -> None:
        self._rows[: len(lines)].copy_(lines, non_blocking=True)
        self._ring.mark_sent()
