"""Run steps as captured graphs, which replace hundreds of kernel launches by one.

Knows the rows of a step, how to pad them to one of a few sizes, and the layout of their inputs; does not know the model
that `compute` runs or how a graph is captured (`Graph`).

The inputs of a step are in int64 tensors, which every graph reads. A decode has one line, and a token of a prefill
chunk has another:

    token id | position | slot | context length | block table ...
    token id | position | slot

The chunks' extents and block tables are those of `PagedChunks`. A step smaller than its graph is padded with decodes of
context length 0, prefill tokens of no chunk, and chunks of no tokens. The padding writes to the cache's last block. No
sequence ever owns that block.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.interface import blocks_for
from engine.native.batch.packing import Ints, StepBatch
from engine.native.batch.sampled_tokens import fill_in
from engine.native.batch.tensors import DecodeTensors, PrefillGroup, StepTensors, chunk_extents, chunk_tables
from engine.native.cuda.graph_sizes import GraphSize
from engine.native.cuda.pinned_ring import PinnedRing
from engine.native.kv.cache import KVCache

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


class StepGraphs:
    """The captured graphs of a model's steps.

    `compute` returns the logits of a step. `sizes` are captured in their order. The last block of `cache` must belong
    to no sequence. `max_blocks` is the largest number of KV blocks of one sequence. `ring` must be used by these graphs
    only.
    """

    def __init__(
        self, compute: Compute, cache: KVCache, sizes: Sequence[GraphSize], max_blocks: int, ring: PinnedRing
    ) -> None:
        self._compute = compute
        self._cache = cache
        self._sizes = sizes
        self._ring = ring
        self._device = cache.layers[0].slots.device
        self._scratch = cache.num_blocks - 1
        most = GraphSize(max(size.decodes for size in sizes), max(size.prefill for size in sizes))
        self._decodes = self._zeros(most.decodes, _TABLE + max_blocks)
        self._prefill = self._zeros(most.prefill, _SLOT + 1)
        self._extents = self._zeros(most.num_chunks, 4)
        self._tables = self._zeros(most.num_chunks * max_blocks)
        self._logit_rows = self._zeros(most.decodes + most.num_chunks)
        self._logits: Tensor | None = None
        self._graphs: dict[GraphSize, Graph] = {}
        self._by_rows: list[GraphSize] = []  # the captured sizes, those with the fewest rows first

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    @property
    def captured_sizes(self) -> list[GraphSize]:
        return sorted(self._graphs)

    @torch.inference_mode()
    def capture(self, make_graph: Callable[[], Graph], has_room: Callable[[], bool], limit_s: float) -> None:
        """Capture graphs until about `limit_s` seconds have passed or `has_room` is false, but at least one graph.

        The engine must have no sequences. Raises `CaptureFailure` if a graph's logits differ from those that the model
        computes without a graph. Exceptions of the capture pass through.
        """
        started = perf_counter()
        for size in self._sizes:
            if self._graphs and (perf_counter() - started > limit_s or not has_room()):
                return
            num_rows = self._fill_for_trial(size)
            self._compute_step(size)  # the first run compiles kernels and allocates workspaces, which a capture forbids
            logits = self._logits_of(num_rows)
            expected = logits.clone()
            graph = make_graph()
            graph.capture(partial(self._compute_step, size))
            logits.zero_()
            graph.replay()
            error = logits.sub_(expected).abs_().max()  # in place, since the logits of many rows are large
            if not bool(error <= _TOLERANCE * expected.abs_().max()):
                raise CaptureFailure(f"the graph of {size} gives logits that differ from its model's")
            self._graphs[size] = graph
            self._by_rows = sorted(self._graphs, key=sum)

    def fitting_size(self, batch: StepBatch) -> GraphSize | None:
        """Return the size of the captured graph that pads `batch` least; None if no graph fits it."""
        num_decodes = sum(group.num_rows for group in batch.decode_groups)
        num_tokens, num_chunks = batch.num_rows - num_decodes, len(batch.prefill_chunks)
        for size in self._by_rows:
            if (
                size.decodes >= num_decodes
                and (size.prefill >= num_tokens if num_tokens else not size.prefill)
                and size.num_chunks >= num_chunks
                and size.decodes + size.num_chunks >= len(batch.logit_rows)
            ):
                return size
        return None

    def decode_replay(self, num_decodes: int) -> Callable[[], None] | None:
        """Return a function that replays the graph of a step of so many decodes, with the inputs of the newest step."""
        sizes = (size for size in self._by_rows if size.decodes >= num_decodes and not size.prefill)
        size = next(sizes, None)
        return None if size is None else self._graphs[size].replay

    @torch.inference_mode()
    def run(self, batch: StepBatch, size: GraphSize, previous: Tensor | None = None) -> Tensor | None:
        """Run the step as the graph of `size`, and return the logits (rows, vocab) of its `logit_rows`, or None.

        The logits are valid until the next call. `previous` holds the token ids of the previous step, which replace the
        placeholders among the tokens of the batch's decodes.
        """
        num_decodes = self._fill(batch, size)
        if previous is not None and num_decodes:
            token_ids = self._decodes[:num_decodes, _TOKEN]
            token_ids.copy_(fill_in(token_ids, previous))
        self._graphs[size].replay()
        return self._logits_of(len(batch.logit_rows)) if len(batch.logit_rows) else None

    def _compute_step(self, size: GraphSize) -> None:
        """Compute a step of this size; graphs capture this function.

        All tensors that depend on a step's inputs are derived from this object's tensors in this function, so that a
        replay uses the new inputs.
        """
        decodes, prefill = self._decodes[: size.decodes], self._prefill[: size.prefill]
        token_ids, positions, slot_ids = (
            torch.cat([decodes[:, column], prefill[:, column]]) for column in (_TOKEN, _POSITION, _SLOT)
        )
        context_lens = decodes[:, _CONTEXT].contiguous()
        group = DecodeTensors(0, decodes[:, _TABLE:], context_lens, self._cache.num_blocks)
        chunks = None
        if size.prefill:
            rows = slice(size.decodes, size.decodes + size.prefill)
            chunks = PrefillGroup([], rows, self._tables, self._extents[: size.num_chunks], size.prefill)
        num_slots = self._cache.num_blocks * self._cache.block_size
        step = StepTensors(token_ids, positions, slot_ids, num_slots, [group], chunks)
        wanted = self._logit_rows[: size.decodes + size.num_chunks]
        logits = self._compute(step, wanted)
        if self._logits is None:
            shape = (len(self._logit_rows), logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        self._logits_of(len(wanted)).copy_(logits)

    def _logits_of(self, num_rows: int) -> Tensor:
        """Return the first logits (num_rows, vocab), as a view of the graphs' output."""
        if self._logits is None:
            raise RuntimeError("no step was computed yet")
        return self._logits[:num_rows]

    def _fill(self, batch: StepBatch, size: GraphSize) -> int:
        """Send the inputs of `batch`, padded to `size`, to the device; return the number of decodes.

        Only the columns of block tables that some decode uses are sent. Entries of a block table past the end of its
        context are never read.
        """
        groups, num_blocks = batch.decode_groups, 1
        if groups:
            num_blocks = max(group.block_table.shape[1] for group in groups)
        num_decodes = sum(group.num_rows for group in groups)
        decodes = np.zeros((size.decodes, _TABLE + num_blocks), dtype=np.int64)
        per_row = (batch.token_ids, batch.positions, batch.slot_ids)
        for column, numbers in enumerate(per_row):
            decodes[:num_decodes, column] = numbers[:num_decodes]
        for group in groups:
            rows = decodes[group.first_row : group.first_row + group.num_rows]
            rows[:, _CONTEXT] = group.context_lens
            rows[:, _TABLE : _TABLE + group.block_table.shape[1]] = group.block_table
        decodes[num_decodes:, _SLOT], decodes[num_decodes:, _TABLE] = self._scratch_slot, self._scratch
        prefill = np.zeros((size.prefill, _SLOT + 1), dtype=np.int64)
        num_tokens = batch.num_rows - num_decodes
        for column, numbers in enumerate(per_row):
            prefill[:num_tokens, column] = numbers[num_decodes:]
        prefill[num_tokens:, _SLOT] = self._scratch_slot
        logit_rows = batch.logit_rows
        if size.prefill:  # the prefill's rows follow the graph's decodes
            logit_rows = np.where(logit_rows < num_decodes, logit_rows, logit_rows + size.decodes - num_decodes)
        extents = chunk_extents(batch.prefill_chunks, num_decodes)
        self._send(size, decodes, prefill, extents, chunk_tables(batch.prefill_chunks), logit_rows)
        return num_decodes

    @property
    def _scratch_slot(self) -> int:
        return self._scratch * self._cache.block_size

    def _fill_for_trial(self, size: GraphSize) -> int:
        """Send decodes with a context of one token, and two chunks from position 0, which together fill the graph.

        Return the number of logits. Each sequence has blocks of its own if there are enough.
        """
        block_size = self._cache.block_size
        tokens = size.decodes, size.prefill // 2, size.prefill - size.prefill // 2
        per_chunk = blocks_for(max(1, tokens[2]), block_size)
        blocks = np.arange(size.blocks_for_trial(block_size)) % self._cache.num_blocks
        own = blocks[: size.decodes]
        ids = np.arange(size.decodes) % 7 + 1
        zeros = np.zeros_like(ids)
        decodes = np.stack([ids, zeros, own * block_size, zeros + 1, own], axis=1)
        prefill, extents, tables = [np.zeros((0, 3), dtype=np.int64)], [], [np.zeros(0, dtype=np.int64)]
        for i, count in enumerate(tokens[1:] if size.prefill else ()):
            at = np.arange(count)
            table = blocks[size.decodes + i * per_chunk :][:per_chunk]
            prefill.append(np.stack([at % 5 + 1, at, table[at // block_size] * block_size + at % block_size], axis=1))
            extents.append((i * tokens[1], count, 0, i * per_chunk))
            tables.append(table)
        ends = [size.decodes + first + count - 1 for first, count, _, _ in extents]
        logit_rows = np.array([*range(size.decodes), *ends], dtype=np.int64)
        described = np.array(extents, dtype=np.int64).reshape(-1, 4)
        self._send(size, decodes, np.concatenate(prefill), described, np.concatenate(tables), logit_rows)
        return len(logit_rows)

    def _send(
        self, size: GraphSize, decodes: Ints, prefill: Ints, extents: Ints, tables: Ints, logit_rows: Ints
    ) -> None:
        """Start to copy a step's inputs, padded with zeros where they are shorter than their part of the graph.

        `decodes` is (size.decodes, columns), `prefill` is (size.prefill, 3), `extents` is (chunks, 4).
        """
        extents = np.pad(extents, ((0, size.num_chunks - len(extents)), (0, 0)))
        logit_rows = np.pad(logit_rows, (0, size.decodes + size.num_chunks - len(logit_rows)))
        parts: list[tuple[Ints, Tensor]] = [
            (decodes, self._decodes[: len(decodes), : decodes.shape[1]]),
            (logit_rows, self._logit_rows[: len(logit_rows)]),
        ]
        if size.prefill:
            parts += [
                (prefill, self._prefill[: len(prefill)]),
                (extents, self._extents[: len(extents)]),
                (tables, self._tables[: len(tables)]),
            ]
        # Copied as a whole first: a copy between host and device that is not contiguous may wait for the device.
        uploaded = torch.split(self._ring.upload([part for part, _ in parts]), [part.size for part, _ in parts])
        for sent, (_, place) in zip(uploaded, parts, strict=True):
            place.copy_(sent.view(place.shape))
