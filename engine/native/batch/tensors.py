"""A packed step on the device: indices and masks that all layers of a forward pass share.

Knows rows, blocks and context lengths; not keys, values or scores. Everything arrives in one copy. Tensors that depend
on a layer's shape or window are made for the first such layer and kept for the others.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.native.batch.packing import Ints, PrefillChunk, StepBatch
from engine.native.kv.cache import head_rows

Upload = Callable[[Seq[Ints]], Tensor]  # copies arrays, end to end, to one int64 tensor on the device


class DecodeTensors:
    """One token each of `num_seqs` sequences, in `rows`. `block_table`: (num_seqs, blocks); `context_lens`:
    (num_seqs,)."""

    def __init__(self, first_row: int, block_table: Tensor, context_lens: Tensor, num_blocks: int) -> None:
        self.num_seqs = len(context_lens)
        self.rows = slice(first_row, first_row + self.num_seqs)
        self.block_table = block_table
        self.context_lens = context_lens
        self._num_blocks = num_blocks
        self._block_rows: dict[int, Tensor] = {}
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def block_rows(self, num_kv_heads: int) -> Tensor:
        """Return the index of the group's blocks for `LayerCache.gather`."""
        if num_kv_heads not in self._block_rows:
            self._block_rows[num_kv_heads] = head_rows(self.block_table, num_kv_heads, self._num_blocks)
        return self._block_rows[num_kv_heads]

    def bias(self, num_kv_heads: int, window: int | None, padded_len: int, dtype: torch.dtype) -> Tensor:
        """Return 0 where a row may attend and -inf elsewhere: (kv_heads × num_seqs, 1, padded_len)."""
        key = (num_kv_heads, window)
        if key not in self._biases:
            positions = torch.arange(padded_len, device=self.context_lens.device)
            last = self.context_lens[:, None] - 1
            bias = _bias(_hidden(positions, last, window), dtype)
            self._biases[key] = bias[None].expand(num_kv_heads, -1, -1).reshape(-1, 1, padded_len)
        return self._biases[key]


class PrefillTensors:
    """Tokens `start … end - 1` of one sequence, in `rows`."""

    def __init__(self, chunk: PrefillChunk, block_table: Tensor, num_blocks: int) -> None:
        self.rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        self.start = chunk.start
        self.end = chunk.end
        self._block_table = block_table
        self._num_blocks = num_blocks
        self._block_rows: dict[int, Tensor] = {}
        self._biases: dict[int | None, Tensor] = {}

    def block_rows(self, num_kv_heads: int) -> Tensor:
        """Return the index of the sequence's blocks for `LayerCache.gather`."""
        if num_kv_heads not in self._block_rows:
            self._block_rows[num_kv_heads] = head_rows(self._block_table, num_kv_heads, self._num_blocks)
        return self._block_rows[num_kv_heads]

    def is_plain_causal(self, window: int | None) -> bool:
        """Return whether a square causal mask suffices: no token was computed before, and the window hides none."""
        return self.start == 0 and (window is None or window >= self.end)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return 0 where a row may attend and -inf elsewhere: (end - start, end)."""
        if window not in self._biases:
            positions = torch.arange(self.end, device=self._block_table.device)
            own = positions[self.start :, None]
            self._biases[window] = _bias(_hidden(positions, own, window), dtype)
        return self._biases[window]


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """All prefill chunks of a step."""

    chunks: list[PrefillTensors]
    rows: slice  # of all chunks
    tables: Tensor  # as in `PagedChunks`
    extents: Tensor  # as in `PagedChunks`

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk."""
        return max(chunk.rows.stop - chunk.rows.start for chunk in self.chunks)


class StepTensors:
    """A step as a forward pass needs it: a token, position and slot for each row, (T,) each, and what each row attends
    to. `num_slots` is the number of slots of the cache. After an eviction, `origin` holds the row numbers that the
    remaining rows had at the start of the pass; before, it is None."""

    def __init__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        num_slots: int,
        decode_groups: list[DecodeTensors],
        prefills: PrefillGroup | None = None,
    ) -> None:
        self.token_ids = token_ids[None]
        self.positions = positions[None]
        self.slots = slots
        self.decode_groups = decode_groups
        self.prefills = prefills
        self.origin: Tensor | None = None
        self._num_slots = num_slots
        self._slot_rows: dict[int, Tensor] = {}

    def own_rows(self, rows: Tensor) -> Tensor:
        """Return the remaining rows of `rows`, which has one line for each row at the start of the pass."""
        return rows if self.origin is None else rows[self.origin]

    def slot_rows(self, num_kv_heads: int) -> Tensor:
        """Return the index of the new tokens' slots for `LayerCache.write`."""
        if num_kv_heads not in self._slot_rows:
            self._slot_rows[num_kv_heads] = head_rows(self.slots, num_kv_heads, self._num_slots)
        return self._slot_rows[num_kv_heads]


@dataclass(frozen=True, slots=True)
class UploadedStep:
    """The device's copy of a `StepBatch`."""

    step: StepTensors
    sampled_rows: Tensor
    unfilled_blocks: Tensor


def upload_step(batch: StepBatch, num_blocks: int, block_size: int, upload: Upload) -> UploadedStep:
    """Copy a packed step to the device, for a cache of `num_blocks` blocks."""
    groups, chunks = batch.decode_groups, batch.prefill_chunks
    first_row = chunks[0].first_row if chunks else batch.num_rows
    unfilled = np.array(batch.unfilled_blocks, dtype=np.int64)
    arrays = [batch.token_ids, batch.positions, batch.slots, batch.sampled_rows, unfilled]
    arrays += [array for group in groups for array in (group.block_table, group.context_lens)]
    arrays += [_extents(chunks, first_row), *(chunk.block_table for chunk in chunks)]
    buffer = upload(arrays)
    tensors = iter(torch.split(buffer, [array.size for array in arrays]))
    token_ids, positions, slots, sampled_rows, unfilled_blocks = (next(tensors) for _ in range(5))
    decode_groups = [
        DecodeTensors(g.first_row, next(tensors).view(g.block_table.shape), next(tensors), num_blocks) for g in groups
    ]
    prefills = None
    if chunks:
        extents = next(tensors).view(len(chunks), -1)
        tables = buffer[-sum(chunk.block_table.size for chunk in chunks) :]
        own = [PrefillTensors(chunk, next(tensors), num_blocks) for chunk in chunks]
        prefills = PrefillGroup(own, slice(first_row, batch.num_rows), tables, extents)
    step = StepTensors(token_ids, positions, slots, num_blocks * block_size, decode_groups, prefills)
    return UploadedStep(step, sampled_rows, unfilled_blocks)


def _extents(chunks: Seq[PrefillChunk], first_row: int) -> Ints:
    """Return `PagedChunks.extents`, with rows counted from `first_row`."""
    starts = np.cumsum([0, *(chunk.block_table.size for chunk in chunks)])[:-1]
    rows = [
        (chunk.first_row - first_row, chunk.num_rows, chunk.start, int(at))
        for chunk, at in zip(chunks, starts, strict=True)
    ]
    return np.array(rows, dtype=np.int64)


def to_cpu(arrays: Seq[Ints]) -> Tensor:
    """An `Upload` for the CPU."""
    return torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))


def _hidden(positions: Tensor, own: Tensor, window: int | None) -> Tensor:
    """Return True where a token at position `own` may not attend: after it, or `window` tokens or more before it."""
    ahead = positions > own
    return ahead if window is None else ahead | (positions <= own - window)


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
