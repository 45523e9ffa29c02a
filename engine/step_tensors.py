"""A packed step on the device: indices and masks that all layers of a forward pass share.

Knows rows, blocks and context lengths; not keys, values or scores. Everything arrives in one copy; what
depends on a layer's shape or window is made when the first such layer asks, and kept for the others.
"""

import numpy as np
import torch
from torch import Tensor

from engine.kv_cache import head_rows
from engine.step_batch import DecodeGroup, PrefillChunk, StepBatch


class DecodeTensors:
    """`rows`: one token each of `num_seqs` sequences."""

    def __init__(self, group: DecodeGroup, block_table: Tensor, context_lens: Tensor, num_blocks: int) -> None:
        self.rows = slice(group.first_row, group.first_row + group.num_rows)
        self.num_seqs = group.num_rows
        self._block_table = block_table
        self._context_lens = context_lens
        self._num_blocks = num_blocks
        self._block_rows: dict[int, Tensor] = {}
        self._biases: dict[tuple[int, int | None], Tensor] = {}

    def block_rows(self, num_kv_heads: int) -> Tensor:
        """Index of the group's blocks for `LayerCache.gather`."""
        if num_kv_heads not in self._block_rows:
            self._block_rows[num_kv_heads] = head_rows(self._block_table, num_kv_heads, self._num_blocks)
        return self._block_rows[num_kv_heads]

    def bias(self, num_kv_heads: int, window: int | None, padded_len: int, dtype: torch.dtype) -> Tensor:
        """0 where a row may look and -inf elsewhere: (kv_heads × num_seqs, 1, padded_len)."""
        key = (num_kv_heads, window)
        if key not in self._biases:
            positions = torch.arange(padded_len, device=self._context_lens.device)
            last = self._context_lens[:, None] - 1
            bias = _bias(_hidden(positions, last, window), dtype)
            self._biases[key] = bias[None].expand(num_kv_heads, -1, -1).reshape(-1, 1, padded_len)
        return self._biases[key]


class PrefillTensors:
    """`rows`: the tokens `start … end - 1` of one sequence."""

    def __init__(self, chunk: PrefillChunk, block_table: Tensor, num_blocks: int) -> None:
        self.rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        self.start = chunk.start
        self.end = chunk.end
        self._block_table = block_table
        self._num_blocks = num_blocks
        self._block_rows: dict[int, Tensor] = {}
        self._biases: dict[int | None, Tensor] = {}

    def block_rows(self, num_kv_heads: int) -> Tensor:
        """Index of the sequence's blocks for `LayerCache.gather`."""
        if num_kv_heads not in self._block_rows:
            self._block_rows[num_kv_heads] = head_rows(self._block_table, num_kv_heads, self._num_blocks)
        return self._block_rows[num_kv_heads]

    def is_plain_causal(self, window: int | None) -> bool:
        """A square causal mask says it all: nothing was computed before and the window hides nothing."""
        return self.start == 0 and (window is None or window >= self.end)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a row may look and -inf elsewhere: (end - start, end)."""
        if window not in self._biases:
            positions = torch.arange(self.end, device=self._block_table.device)
            own = positions[self.start :, None]
            self._biases[window] = _bias(_hidden(positions, own, window), dtype)
        return self._biases[window]


class StepTensors:
    """The device's copy of a `StepBatch`."""

    def __init__(self, batch: StepBatch, num_blocks: int, block_size: int, device: torch.device) -> None:
        tables = [group.block_table for group in batch.decode_groups]
        lens = [group.context_lens for group in batch.decode_groups]
        chunk_tables = [chunk.block_table for chunk in batch.prefill_chunks]
        unfilled = np.array(batch.unfilled_blocks, dtype=np.int64)
        rows = [batch.token_ids, batch.positions, batch.slots, batch.sampled_rows, unfilled]
        tensors = iter(_upload([*rows, *tables, *lens, *chunk_tables], device))
        self.token_ids = next(tensors)[None]
        self.positions = next(tensors)[None]
        self._slots = next(tensors)
        self.sampled_rows = next(tensors)
        self.unfilled_blocks = next(tensors)
        table_tensors = [next(tensors) for _ in tables]
        self.decode_groups = [
            DecodeTensors(group, table, next(tensors), num_blocks)
            for group, table in zip(batch.decode_groups, table_tensors, strict=True)
        ]
        self.prefill_chunks = [PrefillTensors(chunk, next(tensors), num_blocks) for chunk in batch.prefill_chunks]
        self._num_slots = num_blocks * block_size
        self._slot_rows: dict[int, Tensor] = {}

    def slot_rows(self, num_kv_heads: int) -> Tensor:
        """Index of the new tokens' slots for `LayerCache.write`."""
        if num_kv_heads not in self._slot_rows:
            self._slot_rows[num_kv_heads] = head_rows(self._slots, num_kv_heads, self._num_slots)
        return self._slot_rows[num_kv_heads]


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """One host buffer, one copy; from pinned memory it overlaps with what the device is doing."""
    buffer = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    if device.type == "cuda":
        buffer = buffer.pin_memory().to(device, non_blocking=True)
    return list(torch.split(buffer, [array.size for array in arrays]))


def _hidden(positions: Tensor, own: Tensor, window: int | None) -> Tensor:
    """True where a token at position `own` may not look: ahead, or `window` tokens and more behind."""
    ahead = positions > own
    return ahead if window is None else ahead | (positions <= own - window)


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
