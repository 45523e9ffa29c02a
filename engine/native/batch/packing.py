"""Packs the chunks of a step into one list of rows, one row for each token, with all integers that the device needs.

The host does this with numpy, once per step; the result is copied to the device at once. Knows chunks, block tables and
rows; does not know tensors or layers.

    rows       | decode | decode | decode | prefill chunk ......... | prefill chunk .... |
               |<---- one group ---------->|

Chunks of one token (decodes) come first, sorted from the longest context to the shortest. So a group of similar
contexts is a slice of the rows. Each token of a draft is a row like a decode, with a context that ends with it. So it
is computed exactly as in a step of its own, and no row sees what comes after it.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

import numpy as np
import numpy.typing as npt

from engine.interface import blocks_for
from engine.sequences.chunk import Chunk
from engine.sequences.sequence import Sequence

Ints = npt.NDArray[np.int64]

# Number of padding tokens. All contexts of a group are padded to the longest context. An additional group costs about
# five operator calls per layer, which take about as long as copying the keys and values of this many padding tokens.
_PADDED_TOKENS_WORTH_A_GROUP = 1024


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """A group of decodes: `num_rows` tokens, each with its context, in the rows from `first_row` on."""

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
    # Rows whose logits are wanted: first, for each chunk in `sampled_chunks`, its last row and those of its draft;
    # then, for each chunk in `scored_chunks`, the row before each of the chunk's `scored` prompt tokens.
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
    rows, rows_of = _decode_rows(decodes)
    first_rows = list(accumulate((c.num_tokens for c in prefills), initial=len(rows)))
    ordered, rows_of = decodes + prefills, [*rows_of, *((row,) for row in first_rows)]
    sampled = [i for i, chunk in enumerate(ordered) if chunk.samples]
    scored = [i for i, chunk in enumerate(ordered) if chunk.scored]
    return StepBatch(
        token_ids=_concatenate([_tokens(c) for c in prefills], [_token(row) for row in rows]),
        positions=_concatenate([np.arange(c.start, c.end) for c in prefills], [row.start for row in rows]),
        slot_ids=_concatenate([_slots(c, block_size) for c in prefills], [_slot(row, block_size) for row in rows]),
        logit_rows=_concatenate(
            [np.array(ordered[i].scored) - 1 - ordered[i].start + rows_of[i][0] for i in scored],
            [row for i in sampled for row in (rows_of[i][0] + ordered[i].num_tokens - 1, *rows_of[i][1:])],
        ),
        sampled_chunks=tuple(ordered[i] for i in sampled),
        decode_groups=tuple(_decode_groups(rows, block_size)),
        prefill_chunks=tuple(
            PrefillChunk(row, c.start, c.end, np.array(c.sequence.block_table, dtype=np.int64))
            for c, row in zip(prefills, first_rows, strict=False)
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


@dataclass(slots=True, eq=False)
class _DraftRow:
    """A token of a draft, at the position `start` of the sequence. Nothing in it changes."""

    sequence: Sequence
    start: int
    token_id: int

    @property
    def end(self) -> int:
        return self.start + 1


_Row = Chunk | _DraftRow


def _decode_rows(decodes: list[Chunk]) -> tuple[Seq[_Row], Seq[tuple[int, ...]]]:
    """Return the rows of the decodes and of their drafts, the longest context first.

    Also return the rows of each decode: its own, then those of its draft.
    """
    if not any(chunk.draft for chunk in decodes):
        return decodes, [(row,) for row in range(len(decodes))]
    rows: list[_Row] = []
    for chunk in decodes:
        rows.append(chunk)
        rows += (_DraftRow(chunk.sequence, i, token_id) for i, token_id in enumerate(chunk.draft, start=chunk.end))
    order = sorted(range(len(rows)), key=lambda i: -rows[i].end)
    places = iter(np.argsort(order).tolist())
    rows_of = [tuple(islice(places, 1 + len(chunk.draft))) for chunk in decodes]
    return [rows[i] for i in order], rows_of


def _concatenate(prefills: list[Ints], decodes: list[int]) -> Ints:
    first = np.array(decodes, dtype=np.int64)
    return np.concatenate([first, *prefills]) if prefills else first


def _tokens(chunk: Chunk) -> Ints:
    return np.array(chunk.sequence.token_ids[chunk.start : chunk.end], dtype=np.int64)


def _token(row: _Row) -> int:
    return row.sequence.token_ids[row.start] if isinstance(row, Chunk) else row.token_id


def _slot(row: _Row, block_size: int) -> int:
    block, offset = divmod(row.start, block_size)
    return row.sequence.block_table[block] * block_size + offset


def _slots(chunk: Chunk, block_size: int) -> Ints:
    positions = np.arange(chunk.start, chunk.end)
    table = np.array(chunk.sequence.block_table, dtype=np.int64)
    return table[positions // block_size] * block_size + positions % block_size


def _decode_groups(decodes: Seq[_Row], block_size: int) -> Iterator[DecodeGroup]:
    """Yield the decode groups. A group ends where its padding would cost more than an additional group."""
    first, padding = 0, 0
    for i, chunk in enumerate(decodes):
        padding += decodes[first].end - chunk.end
        if padding > _PADDED_TOKENS_WORTH_A_GROUP:
            yield _decode_group(decodes[first:i], first, block_size)
            first, padding = i, 0
    if decodes:
        yield _decode_group(decodes[first:], first, block_size)


def _decode_group(decodes: Seq[_Row], first_row: int, block_size: int) -> DecodeGroup:
    context_lens = np.array([c.end for c in decodes], dtype=np.int64)
    num_blocks = blocks_for(decodes[0].end, block_size)
    table = array("q")
    for chunk in decodes:
        # If the chunk is a piece of a larger chunk or has a draft, its block table continues with blocks that are not
        # written yet, or that it does not see.
        own = chunk.sequence.block_table[: -(-chunk.end // block_size)]
        table.extend(own)
        # The padding is masked. It repeats a block of the same sequence, so that no other KV enters the computation.
        table.extend(own[:1] * (num_blocks - len(own)))
    return DecodeGroup(first_row, len(decodes), np.frombuffer(table, np.int64).reshape(-1, num_blocks), context_lens)
