"""The tensors of a packed step on the device: indices and masks that all layers of a forward pass share.

Knows rows, blocks and context lengths; does not know keys, values or scores. All integers of a step are copied to the
device at once. Tensors that depend on a layer's shape or window are made for the first layer that needs them, and kept
for later layers.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.native.batch.packing import Ints, PrefillChunk, StepBatch
from engine.native.kv.cache import HeadRows

Upload = Callable[[Seq[Ints]], Tensor]  # copies arrays to the device, end to end in one int64 tensor


class DecodeTensors:
    """The tensors of a group of decodes: one token of each of `num_seqs` sequences, in the rows `rows`.

    `block_table` is (num_seqs, blocks); `context_lens` is (num_seqs,).
    """

    def __init__(self, first_row: int, block_table: Tensor, context_lens: Tensor, num_blocks: int) -> None:
        self.num_seqs = len(context_lens)
        self.rows = slice(first_row, first_row + self.num_seqs)
        self.block_table = block_table
        self.context_lens = context_lens
        self.block_rows = HeadRows(block_table, num_blocks)
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def bias(self, num_kv_heads: int, window: int | None, padded_len: int, dtype: torch.dtype) -> Tensor:
        """Return the mask that is added to the scores: (kv_heads × num_seqs, 1, padded_len).

        It is 0 for the tokens that a row may attend to, and -inf for all other tokens.
        """
        key = (num_kv_heads, window)
        if key not in self._biases:
            positions = torch.arange(padded_len, device=self.context_lens.device)
            last = self.context_lens[:, None] - 1
            bias = _bias(_hidden(positions, last, window), dtype)
            self._biases[key] = bias[None].expand(num_kv_heads, -1, -1).reshape(-1, 1, padded_len)
        return self._biases[key]


class PrefillTensors:
    """The tensors of a prefill chunk: the tokens `start … end - 1` of one sequence, in the rows `rows`."""

    def __init__(self, chunk: PrefillChunk, block_table: Tensor, num_blocks: int) -> None:
        self.rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        self.start = chunk.start
        self.end = chunk.end
        self.block_rows = HeadRows(block_table, num_blocks)
        self._device = block_table.device
        self._biases: dict[int | None, Tensor] = {}

    def is_plain_causal(self, window: int | None) -> bool:
        """Return whether a square causal mask suffices.

        It suffices if no token was computed before the chunk and the window hides no token.
        """
        return self.start == 0 and (window is None or window >= self.end)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask that is added to the scores: (end - start, end).

        It is 0 for the tokens that a row may attend to, and -inf for all other tokens.
        """
        if window not in self._biases:
            positions = torch.arange(self.end, device=self._device)
            own = positions[self.start :, None]
            self._biases[window] = _bias(_hidden(positions, own, window), dtype)
        return self._biases[window]


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """All prefill chunks of a step."""

    chunks: list[PrefillTensors]  # for torch's operators; empty in a graph, which has kernels
    rows: slice  # the rows of all chunks
    tables: Tensor  # as in `PagedChunks`
    extents: Tensor  # as in `PagedChunks`
    longest: int  # the number of tokens of the longest chunk, or more
    num_single: int = 0  # as in `PagedChunks`


class StepTensors:
    """The tensors of a step that a forward pass needs.

    Each row has a token, a position and a slot: `token_ids`, `positions` and `slot_ids` are (T,). `decode_groups` and
    `prefills` say which tokens each row attends to. `num_slots` is the number of slots of the cache.
    """

    def __init__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_ids: Tensor,
        num_slots: int,
        decode_groups: list[DecodeTensors],
        prefills: PrefillGroup | None = None,
    ) -> None:
        self.token_ids = token_ids[None]
        self.positions = positions[None]
        self.slot_ids = slot_ids
        self.decode_groups = decode_groups
        self.prefills = prefills
        self.slot_rows = HeadRows(slot_ids, num_slots)


def decodes_to_chunks(step: StepTensors) -> None:
    """Make each decode of `step` a prefill chunk of one token, in place. A padding row becomes a chunk of no tokens.

    Then one kernel attends for all rows, and sums in one order. The kernel for decodes rounds differently.
    """
    tables, extents, num_blocks, longest = [], [], 0, 1
    for group in step.decode_groups:
        each = torch.arange(group.num_seqs, device=group.context_lens.device)
        columns = (each + group.rows.start, group.context_lens.clamp(max=1), group.context_lens - 1)
        extents.append(torch.stack((*columns, each * group.block_table.shape[1] + num_blocks), dim=1))
        tables.append(group.block_table.reshape(-1))
        num_blocks += group.block_table.numel()
    if (prefills := step.prefills) is not None:
        rows, counts, starts, first_blocks = prefills.extents.unbind(1)
        columns = (rows + prefills.rows.start, counts, starts)
        extents.append(torch.stack((*columns, first_blocks + num_blocks), dim=1))
        tables.append(prefills.tables)
        longest = prefills.longest
    every_row, num_single = slice(0, len(step.slot_ids)), sum(group.num_seqs for group in step.decode_groups)
    step.decode_groups = []
    step.prefills = PrefillGroup([], every_row, torch.cat(tables), torch.cat(extents), longest, num_single)


@dataclass(frozen=True, slots=True)
class UploadedStep:
    """The copy of a `StepBatch` on the device."""

    step: StepTensors
    logit_rows: Tensor
    unfilled_blocks: Tensor


def upload_step(batch: StepBatch, num_blocks: int, block_size: int, upload: Upload) -> UploadedStep:
    """Copy a packed step to the device. The KV cache has `num_blocks` blocks of `block_size` tokens."""
    groups, chunks = batch.decode_groups, batch.prefill_chunks
    first_row = chunks[0].first_row if chunks else batch.num_rows
    unfilled = np.array(batch.unfilled_blocks, dtype=np.int64)
    arrays = [batch.token_ids, batch.positions, batch.slot_ids, batch.logit_rows, unfilled]
    arrays += [array for group in groups for array in (group.block_table, group.context_lens)]
    arrays += [chunk_extents(chunks, first_row), *(chunk.block_table for chunk in chunks)]
    buffer = upload(arrays)
    tensors = iter(torch.split(buffer, [array.size for array in arrays]))
    token_ids, positions, slot_ids, logit_rows, unfilled_blocks = (next(tensors) for _ in range(5))
    decode_groups = [
        DecodeTensors(g.first_row, next(tensors).view(g.block_table.shape), next(tensors), num_blocks) for g in groups
    ]
    prefills = None
    if chunks:
        extents = next(tensors).view(len(chunks), -1)
        tables = buffer[-sum(chunk.block_table.size for chunk in chunks) :]
        own = [PrefillTensors(chunk, next(tensors), num_blocks) for chunk in chunks]
        longest = max(chunk.num_rows for chunk in chunks)
        prefills = PrefillGroup(own, slice(first_row, batch.num_rows), tables, extents, longest)
    step = StepTensors(token_ids, positions, slot_ids, num_blocks * block_size, decode_groups, prefills)
    return UploadedStep(step, logit_rows, unfilled_blocks)


def chunk_extents(chunks: Seq[PrefillChunk], first_row: int) -> Ints:
    """Return `PagedChunks.extents` for these chunks, (chunks, 4); rows are counted from `first_row`."""
    starts = np.cumsum([0, *(chunk.block_table.size for chunk in chunks)])[:-1]
    rows = [
        (chunk.first_row - first_row, chunk.num_rows, chunk.start, int(at))
        for chunk, at in zip(chunks, starts, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def chunk_tables(chunks: Seq[PrefillChunk]) -> Ints:
    """Return `PagedChunks.block_tables` for these chunks, (blocks,)."""
    return np.concatenate([chunk.block_table for chunk in chunks]) if chunks else np.zeros(0, dtype=np.int64)


def to_cpu(arrays: Seq[Ints]) -> Tensor:
    """Implements `Upload` for the CPU: return the arrays, end to end, as one tensor."""
    return torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))


def _hidden(positions: Tensor, own: Tensor, window: int | None) -> Tensor:
    """Return a mask that is True for the positions to which a token at position `own` may not attend.

    These are all positions after `own` and, if there is a window, those at least `window` tokens before `own`.
    """
    ahead = positions > own
    return ahead if window is None else ahead | (positions <= own - window)


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
