"""Call the Triton attention kernels on tensors: choose grids and tile sizes for a shape, a dtype and a device.

Knows shapes and strides; does not know layers, sequences or the kernels' arithmetic.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.cuda.triton_kernels import DOT_DTYPES, decode_merge_kernel, decode_split_kernel, prefill_kernel

_MAX_HEAD_DIM = 256
_MAX_GROUP = 64  # query heads per KV head
_MIN_TILE = 16  # smallest side of a matrix product on tensor cores
_TILE_BYTES = 16 << 10  # bytes of a tile of keys
# Triton's number of stages of the loop over tiles. With fewer, it loads a tile of keys and values only after the tile
# before was computed. The two tiles take at most 73 KiB of shared memory, which every GPU since sm_80 has.
DECODE_STAGES = 5
_MAX_SPLITS = 32  # largest number of parts of one context; a separate program computes each part
_PROGRAMS_PER_PROCESSOR = 4  # programs to start per streaming multiprocessor
_ALL = 1 << 30  # tokens of a window that hides none


class TritonKernels:
    """The Triton `AttentionKernels` of one device. The result of a row whose context length is 0 is zeros."""

    def __init__(self, num_processors: int, min_split: int = 128, *, exact: bool = False) -> None:
        """`num_processors` is the number of streaming multiprocessors of the device.

        Contexts are split into parts of at least `min_split` keys, until every processor has work. With `exact`, a row
        of `paged_prefill` does not depend on the rows beside it.
        """
        self._num_programs = _PROGRAMS_PER_PROCESSOR * num_processors
        self._min_split = min_split
        self._exact = exact

    def can_attend(self, shape: HeadShape) -> bool:
        # Triton compiles a kernel anew for strides that are no multiples of 16, and these may depend on the rows.
        if self._exact and shape.head_dim % 16:
            return False
        group = shape.num_query_heads // shape.num_kv_heads
        return shape.head_dim <= _MAX_HEAD_DIM and group <= _MAX_GROUP

    def paged_decode(self, query: Tensor, num_kv_heads: int, paged: PagedRows, scoring: Scoring) -> Tensor:
        """Implements `AttentionKernels.paged_decode`: (heads, rows, head_dim) to (rows, heads, head_dim).

        Launches two kernels: the first computes the splits of all contexts, the second merges them. Rows that keep all
        processors busy have one split each, and need no second kernel.
        """
        heads, rows, dim = query.shape
        group = _group_of(query, num_kv_heads, paged.slots)
        if len(paged.context_lens) != rows:
            raise ValueError(f"{rows} rows of queries, but {len(paged.context_lens)} context lengths")
        tile = _tile(dim, query.dtype)
        min_split = max(tile, self._min_split // tile * tile)
        splits = self._num_splits(rows * num_kv_heads)
        out = query.new_empty(rows, heads, dim)
        stored = splits if splits > 1 else 0
        partial = torch.empty(rows, heads, stored, dim, dtype=torch.float32, device=query.device)
        state = torch.empty(rows, heads, stored, 2, dtype=torch.float32, device=query.device)
        window = scoring.window or 0
        decode_split_kernel[(rows, num_kv_heads, splits)](
            query,
            paged.slots,
            out if paged.scales is None else paged.scales,
            paged.block_table,
            paged.context_lens,
            out if scoring.sinks is None else scoring.sinks,
            out,
            partial,
            state,
            scoring.scaling,
            scoring.softcap or 0.0,
            window,
            len(paged.slots) // (2 * num_kv_heads),
            query.stride(1),
            query.stride(0),
            paged.block_table.stride(0),
            BLOCK_SIZE=paged.block_size,
            HEAD_DIM=dim,
            PADDED_DIM=_padded(dim),
            GROUP=group,
            PADDED_GROUP=_padded(group),
            KV_HEADS=num_kv_heads,
            TILE=tile,
            MIN_SPLIT=min_split,
            HAS_SOFTCAP=scoring.softcap is not None,
            HAS_WINDOW=scoring.window is not None,
            HAS_SINKS=scoring.sinks is not None,
            IS_FP8=paged.scales is not None,
            DOT_DTYPE=dot_dtype(query),
            num_stages=DECODE_STAGES,
        )
        if splits == 1:
            return out
        decode_merge_kernel[(rows, heads)](
            partial,
            state,
            paged.context_lens,
            state if scoring.sinks is None else scoring.sinks,
            out,
            window,
            splits,
            HEADS=heads,
            HEAD_DIM=dim,
            PADDED_DIM=_padded(dim),
            MAX_SPLITS=_MAX_SPLITS,
            TILE=tile,
            MIN_SPLIT=min_split,
            HAS_WINDOW=scoring.window is not None,
            HAS_SINKS=scoring.sinks is not None,
        )
        return out

    def paged_prefill(self, query: Tensor, num_kv_heads: int, chunks: PagedChunks, scoring: Scoring) -> Tensor | None:
        """Implements `AttentionKernels.paged_prefill`: (heads, rows, head_dim) to (rows, heads, head_dim).

        Never returns None.
        """
        heads, rows, dim = query.shape
        group = _group_of(query, num_kv_heads, chunks.slots)
        padded_rows = max(_padded(group), _rows(dim, query.dtype))
        tokens = padded_rows // group
        out = query.new_empty(rows, heads, dim)
        # The kernel has a loop of its own, compiled apart, for tiles that all rows of a program see. With a window,
        # there is one loop for all tiles, so it does not matter which rows are in a program.
        window = _ALL if self._exact and scoring.window is None else scoring.window
        singles, others = chunks.extents[: chunks.num_single], chunks.extents[chunks.num_single :]
        for extents, longest in ((singles, 1), (others, chunks.longest)):
            if not len(extents):
                continue
            prefill_kernel[(-(-longest // tokens), len(extents), num_kv_heads)](
                query,
                chunks.slots,
                out if chunks.scales is None else chunks.scales,
                chunks.block_tables,
                extents,
                out if scoring.sinks is None else scoring.sinks,
                out,
                scoring.scaling,
                scoring.softcap or 0.0,
                window or 0,
                len(chunks.slots) // (2 * num_kv_heads),
                query.stride(1) if rows > 1 else heads * dim,  # the stride of a single row may be anything
                query.stride(0),
                BLOCK_SIZE=chunks.block_size,
                HEAD_DIM=dim,
                PADDED_DIM=_padded(dim),
                GROUP=group,
                KV_HEADS=num_kv_heads,
                TOKENS=tokens,
                ROWS=padded_rows,
                TILE=_tile(dim, query.dtype),
                HAS_SOFTCAP=scoring.softcap is not None,
                HAS_WINDOW=window is not None,
                HAS_SINKS=scoring.sinks is not None,
                IS_FP8=chunks.scales is not None,
                DOT_DTYPE=dot_dtype(query),
            )
        return out

    def _num_splits(self, num_contexts: int) -> int:
        """Return the number of splits per context.

        The number does not depend on the contexts' lengths, so the grid in a captured graph is right for all lengths.
        """
        return max(1, min(_MAX_SPLITS, -(-self._num_programs // num_contexts)))


def _group_of(query: Tensor, num_kv_heads: int, slots: Tensor) -> int:
    """Return the number of query heads per KV head. Raises `ValueError` if query and cache do not fit together."""
    heads, _, dim = query.shape
    if slots.shape[1] != dim or heads % num_kv_heads or query.stride(-1) != 1 or not slots.is_contiguous():
        raise ValueError(f"queries of shape {tuple(query.shape)} do not fit this cache and its {num_kv_heads} KV heads")
    return heads // num_kv_heads


@cache
def _padded(size: int) -> int:
    """Return the smallest power of 2 that is at least `size` and at least `_MIN_TILE`."""
    return max(_MIN_TILE, 1 << (size - 1).bit_length())


@cache
def _rows(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of rows (tokens × query heads per KV head) of a prefill program.

    With more rows, each loaded key is reused more often, but the rows' sums must fit into registers. float32 products
    do not use tensor cores, so more than 32 rows would not be faster and would take many seconds to compile.
    """
    if dtype is torch.float32:
        return 32
    return 128 if _padded(head_dim) <= 64 else 64


@cache
def _tile(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of keys in a tile."""
    most = 32 if dtype is torch.float32 else 64
    return max(_MIN_TILE, min(most, _TILE_BYTES // (_padded(head_dim) * dtype.itemsize)))


def dot_dtype(query: Tensor) -> Any:
    """Return the Triton dtype of the operands of matrix products.

    It is the queries' dtype, except for bfloat16 on a CPU: Triton's interpreter stores bfloat16 as integers and would
    multiply these integers.
    """
    return DOT_DTYPES[query.dtype if query.is_cuda or query.dtype is not torch.bfloat16 else torch.float32]
