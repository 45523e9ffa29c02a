"""Packs the chunks of a step into one list of rows, one row for each token, with all integers that the device needs.

The host does this with numpy, once per step; the result is copied to the device at once. Knows chunks, block tables and
rows; does not know tensors or layers.

    rows       | decode | decode | decode | prefill chunk ......... | prefill chunk .... |
               |<---- one group ---------->|

Chunks of one token (decodes) come first, sorted from the longest context to the shortest. So a group of similar
contexts is a slice of the rows.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from engine.interface import blocks_for
from engine.sequences.chunk import Chunk

Ints = npt.NDArray[np.int64]

# Number of padding tokens. All contexts of a group are padded to the longest context. An additional group costs about
# five operator calls per layer, which take about as long as copying the keys and values of this many padding tokens.
_PADDED_TOKENS_WORTH_A_GROUP = 1024


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """A group of decodes: one token of each of `num_rows` sequences, in the rows from `first_row` on."""

    first_row: int
    num_rows: int
    block_table: Ints  # (num_rows, blocks)
    context_lens: Ints  # (num_rows,): tokens that the row attends to, itself included


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A prefill chunk: the tokens `start … end - 1` (at least two) of one sequence, in the rows from `first_row` on."""

    first_row: int
    start: int
    end: int
    block_table: Ints

    @property
    def num_rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A packed step, with one row for each token."""

    token_ids: Ints
    positions: Ints
    slot_ids: Ints  # the slot of each row's key and value: block × block_size + offset
    # Rows whose logits are wanted: first the last row of each chunk in `sampled_chunks`; then, for each chunk in
    # `scored_chunks`, the row before each of the chunk's `scored` prompt tokens.
    logit_rows: Ints
    sampled_chunks: tuple[Chunk, ...]
    decode_groups: tuple[DecodeGroup, ...]
    prefill_chunks: tuple[PrefillChunk, ...]
    unfilled_blocks: tuple[int, ...] = field(default=())  # new blocks with slots that the step does not write
    scored_chunks: tuple[Chunk, ...] = field(default=())

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def pack_step(chunks: list[Chunk], block_size: int) -> StepBatch:
    """Return the packed chunks of one step. There must be at least one chunk."""
    decodes, prefills = _in_order(chunks)
    ordered = decodes + prefills
    first_rows = list(accumulate((c.num_tokens for c in ordered), initial=0))
    sampled = [i for i, chunk in enumerate(ordered) if chunk.samples]
    scored = [i for i, chunk in enumerate(ordered) if chunk.scored]
    return StepBatch(
        token_ids=_concatenate([_tokens(c) for c in prefills], [c.sequence.token_ids[c.start] for c in decodes]),
        positions=_concatenate([np.arange(c.start, c.end) for c in prefills], [c.start for c in decodes]),
        slot_ids=_concatenate([_slots(c, block_size) for c in prefills], [_slot(c, block_size) for c in decodes]),
        logit_rows=_concatenate(
            [np.array(ordered[i].scored) - 1 - ordered[i].start + first_rows[i] for i in scored],
            [first_rows[i + 1] - 1 for i in sampled],
        ),
        sampled_chunks=tuple(ordered[i] for i in sampled),
        decode_groups=tuple(_decode_groups(decodes, block_size)),
        prefill_chunks=tuple(
            PrefillChunk(row, c.start, c.end, np.array(c.sequence.block_table, dtype=np.int64))
            for c, row in zip(prefills, first_rows[len(decodes) :], strict=False)
        ),
        unfilled_blocks=tuple(c.unfilled_block for c in chunks if c.unfilled_block is not None),
        scored_chunks=tuple(ordered[i] for i in scored),
    )


def in_one_group(batch: StepBatch) -> StepBatch:
    """Return the batch with all decodes in one group.

    This is for kernels that read only a row's own context: padding costs them nothing, but each group costs a call.
    """
    groups = batch.decode_groups
    if len(groups) < 2:
        return batch
    widest = max(group.block_table.shape[1] for group in groups)
    tables = [np.pad(g.block_table, ((0, 0), (0, widest - g.block_table.shape[1])), mode="edge") for g in groups]
    context_lens = np.concatenate([group.context_lens for group in groups])
    one = DecodeGroup(groups[0].first_row, len(context_lens), np.concatenate(tables), context_lens)
    return replace(batch, decode_groups=(one,))


def _in_order(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """Return decodes and prefill chunks, each in the order of their rows. A subset of chunks keeps this order."""
    decodes = sorted((c for c in chunks if c.num_tokens == 1), key=lambda c: -c.end)
    return decodes, [c for c in chunks if c.num_tokens > 1]


def _concatenate(prefills: list[Ints], decodes: list[int]) -> Ints:
    first = np.array(decodes, dtype=np.int64)
    return np.concatenate([first, *prefills]) if prefills else first


def _tokens(chunk: Chunk) -> Ints:
    return np.array(chunk.sequence.token_ids[chunk.start : chunk.end], dtype=np.int64)


def _slot(chunk: Chunk, block_size: int) -> int:
    block, offset = divmod(chunk.start, block_size)
    return chunk.sequence.block_table[block] * block_size + offset


def _slots(chunk: Chunk, block_size: int) -> Ints:
    positions = np.arange(chunk.start, chunk.end)
    table = np.array(chunk.sequence.block_table, dtype=np.int64)
    return table[positions // block_size] * block_size + positions % block_size


def _decode_groups(decodes: list[Chunk], block_size: int) -> Iterator[DecodeGroup]:
    """Yield the decode groups. A group ends where its padding would cost more than an additional group."""
    first, padding = 0, 0
    for i, chunk in enumerate(decodes):
        padding += decodes[first].end - chunk.end
        if padding > _PADDED_TOKENS_WORTH_A_GROUP:
            yield _decode_group(decodes[first:i], first, block_size)
            first, padding = i, 0
    if decodes:
        yield _decode_group(decodes[first:], first, block_size)


def _decode_group(decodes: list[Chunk], first_row: int, block_size: int) -> DecodeGroup:
    context_lens = np.array([c.end for c in decodes], dtype=np.int64)
    num_blocks = blocks_for(decodes[0].end, block_size)
    table = array("q")
    for chunk in decodes:
        # If the chunk is a piece of a larger chunk, its block table continues with blocks that are not written yet.
        own = chunk.sequence.block_table[: -(-chunk.end // block_size)]
        table.extend(own)
        # The padding is masked. It repeats a block of the same sequence, so that no other KV enters the computation.
        table.extend(own[:1] * (num_blocks - len(own)))
    return DecodeGroup(first_row, len(decodes), np.frombuffer(table, np.int64).reshape(-1, num_blocks), context_lens)
