"""Run decode steps as captured graphs, which replace hundreds of kernel launches by one.

Knows steps of one token per row, how to pad them to one of a few sizes, and the layout of their inputs; does not know
the model that `compute` runs or how a graph is captured (`Graph`).

The inputs of a step are in one int64 tensor with one line per row, which every graph reads:

    token id | position | slot | context length | block table ...

A step smaller than its graph is padded with rows of context length 0, which write to the cache's last block. No
sequence ever owns that block.
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

_MAX_ROWS = 512  # rows of the largest graph
_TOKEN, _POSITION, _SLOT, _CONTEXT, _TABLE = range(5)  # columns
_TOLERANCE = 0.02  # allowed error of a graph's logits, as a share of the largest logit

# A function from a step and the indices of some rows (int64) to the logits (rows, vocab) of these rows.
Compute = Callable[[StepTensors, Tensor], Tensor]


class Graph(Protocol):
    """A recording of a function's device work, which can be repeated on the same tensors."""

    def capture(self, function: Callable[[], object]) -> None:
        """Capture `function`. Exceptions of the function and the device pass through."""
        ...

    def replay(self) -> None: ...


class CaptureFailure(Exception):
    """Raised if the graphs cannot be used; the message says why."""


def bucket_sizes(max_rows: int) -> list[int]:
    """Return the sizes of the graphs to capture, in rows, ascending. The last is `max_rows`, but at most `_MAX_ROWS`.

    Padding adds less than 8 rows up to 256, and less than 32 above.
    """
    max_rows = min(max_rows, _MAX_ROWS)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, _MAX_ROWS, 32)) if size < max_rows] + [max_rows]


def _capture_order(sizes: Sequence[int]) -> list[int]:
    """Return `sizes` in the order of capture: the largest size, then powers of 2, then all other sizes.

    The largest graph fits every step, and the smaller graphs reuse its memory. With graphs for powers of 2, padding at
    most doubles a step.
    """
    return sorted(sizes, key=lambda size: (size != max(sizes), size & (size - 1) != 0, -size))


class DecodeGraphs:
    """The captured graphs of a model's decode steps.

    `compute` returns the logits of a step. The last block of `cache` must belong to no sequence. `max_blocks` is the
    largest number of KV blocks of one sequence. `ring` must be used by these graphs only.
    """

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
        """Capture graphs until about `limit_s` seconds have passed or `has_room` is false, but at least one graph.

        The engine must have no sequences. Raises `CaptureFailure` if a graph's logits differ from those that the model
        computes without a graph. Exceptions of the capture pass through.
        """
        started = perf_counter()
        for size in _capture_order(self._sizes):
            if self._graphs and (perf_counter() - started > limit_s or not has_room()):
                return
            self._fill_for_trial(size)
            self._compute_rows(size)  # the first run compiles kernels and allocates workspaces, which a capture forbids
            expected = self._logits_of(size).clone()
            graph = make_graph()
            graph.capture(partial(self._compute_rows, size))
            self._logits_of(size).zero_()
            graph.replay()
            error = (self._logits_of(size) - expected).abs().max()
            if not bool(error <= _TOLERANCE * expected.abs().max()):
                raise CaptureFailure(f"the graph of {size} rows gives logits that differ from its model's")
            self._graphs[size] = graph

    @torch.inference_mode()
    def run(self, batch: StepBatch, previous: Tensor | None = None) -> Tensor | None:
        """Run the step and return the logits (rows, vocab) of all rows; None if no graph fits the step.

        The logits are valid until the next call. `previous` holds the token ids of the previous step, which replace the
        placeholders among the batch's tokens.
        """
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
        """Return the smallest captured size that is at least `num_rows`; None if there is none."""
        return next((size for size in self.captured_sizes if size >= num_rows), None)

    def _compute_rows(self, size: int) -> None:
        """Compute the first `size` rows; graphs capture this function.

        All tensors that depend on a step's inputs are derived from `_rows` in this function, so that a replay uses the
        new inputs.
        """
        columns = [self._rows[:size, column].contiguous() for column in range(_TABLE)]
        group = DecodeTensors(0, self._rows[:size, _TABLE:], columns[_CONTEXT], self._cache.num_blocks)
        num_slots = self._cache.num_blocks * self._cache.block_size
        step = StepTensors(columns[_TOKEN], columns[_POSITION], columns[_SLOT], num_slots, [group])
        logits = self._compute(step, self._all_rows[:size])
        if self._logits is None:
            self._logits = torch.empty(self._sizes[-1], logits.shape[1], dtype=logits.dtype, device=logits.device)
        self._logits_of(size).copy_(logits)

    def _logits_of(self, size: int) -> Tensor:
        """Return the logits (size, vocab) of the first rows, as a view of the graphs' output."""
        if self._logits is None:
            raise RuntimeError("no step was computed yet")
        return self._logits[:size]

    def _fill(self, batch: StepBatch, size: int) -> None:
        """Send the inputs of `batch`, padded to `size` rows, to the device.

        Only the columns that some row of the step uses are sent. Entries of a block table past the end of its context
        are never read.
        """
        buffer = self._next_lines(size, max(group.block_table.shape[1] for group in batch.decode_groups))
        lines = buffer.numpy()
        lines[:, _TABLE:] = 0
        used = lines[: batch.num_rows]
        used[:, _TOKEN], used[:, _POSITION], used[:, _SLOT] = batch.token_ids, batch.positions, batch.slot_ids
        for group in batch.decode_groups:
            rows = used[group.first_row : group.first_row + group.num_rows]
            rows[:, _CONTEXT] = group.context_lens
            rows[:, _TABLE : _TABLE + group.block_table.shape[1]] = group.block_table
        lines[batch.num_rows :, : _TABLE + 1] = (0, 0, self._scratch * self._cache.block_size, 0, self._scratch)
        self._send(buffer)

    def _fill_for_trial(self, size: int) -> None:
        """Send `size` rows with a context of one token to the device; each has its own block if there are enough."""
        buffer = self._next_lines(size, 1)
        lines, blocks = buffer.numpy(), np.arange(size) % self._cache.num_blocks
        lines[:, _TOKEN], lines[:, _POSITION], lines[:, _CONTEXT] = np.arange(size) % 7 + 1, 0, 1
        lines[:, _SLOT], lines[:, _TABLE] = blocks * self._cache.block_size, blocks
        self._send(buffer)

    def _next_lines(self, size: int, num_blocks: int) -> Tensor:
        """Return the next host buffer, (size, columns) int64, for `size` rows with block tables of `num_blocks` blocks.

        It may hold old data.
        """
        return self._ring.next_buffer(size * (_TABLE + num_blocks)).view(size, -1)

    def _send(self, lines: Tensor) -> None:
        """Start to copy `lines` (size, columns), int64, from the host to the device."""
        # Copied as a whole first: a copy between host and device that is not contiguous may wait for the device.
        uploaded = torch.empty_like(lines, device=self._rows.device, pin_memory=False)
        uploaded.copy_(lines, non_blocking=True)
        self._rows[: len(lines), : lines.shape[1]] = uploaded
        self._ring.mark_sent()
