"""Triton kernels for attention over paged KV: decode rows, and prefill chunks of many sequences at once.

Knows rows, blocks and scores; does not know sequences, layers or graphs. No kernel needs the host to wait for the
device, so the calls can be captured in a CUDA graph. Without a GPU the tests run the same kernels in Triton's
interpreter.

All kernels read a layer's cache as `LayerCache.slots`: (2 × kv_heads × slots, head_dim), all keys, then all values. The
query heads of a KV head are packed as rows of one matrix product. Scores are multiplied by log2(e), so that the softmax
is computed with exp2. Products of float32 are exact ("ieee"), not TF32.
"""

# mypy: ignore-errors
# Triton's language has types of its own.

import torch
import triton
import triton.language as tl

from engine.native.cuda.triton_tiles import LOG2_E, LOWEST, accumulate, load_tile, score

DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _split_size(length, window, num_splits, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the first visible position, the start of its tile, and the number of keys per split."""
    visible = length * 0
    if HAS_WINDOW:
        visible = tl.maximum(length - window, 0)
    start = visible // TILE * TILE
    size = tl.cdiv(tl.cdiv(length - start, num_splits), TILE) * TILE
    return visible, start, tl.maximum(size, MIN_SPLIT)


@triton.jit(
    do_not_specialize=["window", "num_slots", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "context_lens"],
)
def decode_split_kernel(
    query,  # (rows, heads, head_dim), strided
    slots,  # (2 × kv_heads × slots, head_dim)
    scales,  # (2 × kv_heads × slots,), float32; unused without IS_FP8
    block_table,  # (rows, blocks), int64
    context_lens,  # (rows,), int64: 0 for a row that only pads a captured graph
    sinks,  # (heads,); unused without HAS_SINKS
    out,  # out if there is one split: (rows, heads, head_dim)
    partial,  # out if there are more: (rows, heads, splits, head_dim), float32
    partial_state,  # out if there are more: (rows, heads, splits, 2), float32: best and total of the running softmax
    scaling,
    softcap,
    window,
    num_slots,
    row_stride,
    head_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # HEAD_DIM padded to a power of 2
    GROUP: tl.constexpr,  # query heads per KV head
    PADDED_GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,  # keys per tile
    MIN_SPLIT: tl.constexpr,  # fewest keys of a split: a multiple of TILE
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,  # dtype of the operands of matrix products
):
    """Compute one split of one row's context: acc = Σ 2^(score - best) · value and the state (best, total).

    Grid: (rows, KV_HEADS, splits). The number of splits does not depend on the contexts' lengths, so that the grid in a
    captured graph stays right. Splits without keys write nothing. A single split writes the attention itself, acc /
    total; it is zeros for a row whose context length is 0. Assumes that the row's own key and value are in the cache.
    """
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    length = tl.load(context_lens + row).to(tl.int32)
    visible, start, size = _split_size(length, window, num_splits, TILE, MIN_SPLIT, HAS_WINDOW)
    first = start + split * size
    last = tl.minimum(first + size, length)
    heads, dims = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM)
    is_query = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    if (first < last) | (num_splits == 1):
        places = row * row_stride + (kv_head * GROUP + heads) * head_stride
        queries = tl.load(query + places[:, None] + dims[None, :], mask=is_query, other=0.0)
        best = tl.full([PADDED_GROUP], LOWEST, tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        acc = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
        table = block_table + row * table_stride
        for tile in range(first, last, TILE):
            positions = tile + tl.arange(0, TILE)
            is_key = (positions < last) & (positions >= visible)
            keys, values, key_scales, value_scales = load_tile(
                slots,
                scales,
                table,
                positions,
                is_key,
                kv_head,
                num_slots,
                False,
                BLOCK_SIZE,
                HEAD_DIM,
                PADDED_DIM,
                KV_HEADS,
                IS_FP8,
                DOT_DTYPE,
            )
            scores = score(queries, keys, key_scales, scaling, softcap, HAS_SOFTCAP, IS_FP8, DOT_DTYPE)
            best, total, acc = accumulate(
                best, total, acc, scores, is_key[None, :], values, value_scales, False, IS_FP8, DOT_DTYPE
            )
        head = row * (KV_HEADS * GROUP) + kv_head * GROUP + heads
        if num_splits == 1:
            if HAS_SINKS:
                sink = tl.load(sinks + kv_head * GROUP + heads, mask=heads < GROUP, other=0.0).to(tl.float32) * LOG2_E
                highest = tl.maximum(best, sink)
                shrink = tl.exp2(best - highest)
                total = total * shrink + tl.exp2(sink - highest)
                acc = acc * shrink[:, None]
            attended = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + head[:, None] * HEAD_DIM + dims[None, :], attended.to(out.dtype.element_ty), mask=is_query)
        else:
            at = head * num_splits + split
            tl.store(partial + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_query)
            tl.store(partial_state + at * 2, best, mask=heads < GROUP)
            tl.store(partial_state + at * 2 + 1, total, mask=heads < GROUP)


@triton.jit(do_not_specialize=["window", "num_splits"], do_not_specialize_on_alignment=["context_lens"])
def decode_merge_kernel(
    partial,  # (rows, heads, splits, head_dim), float32
    partial_state,  # (rows, heads, splits, 2), float32: best and total
    context_lens,  # (rows,), int64
    sinks,  # (heads,); unused without HAS_SINKS
    out,  # (rows, heads, head_dim)
    window,
    num_splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # a power of 2, at least num_splits
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the splits s of a context: out = (Σ 2^(best_s - best) · acc_s) / (Σ 2^(best_s - best) · total_s).

    Grid: (rows, HEADS). Assumes that `decode_split_kernel` was called with the same window, TILE and MIN_SPLIT. The
    result of a row whose context length is 0 is zeros.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(context_lens + row).to(tl.int32)
    visible, start, size = _split_size(length, window, num_splits, TILE, MIN_SPLIT, HAS_WINDOW)
    splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, PADDED_DIM)
    is_split = (splits < num_splits) & (start + splits * size < length)
    at = (row * HEADS + head) * num_splits + splits
    bests = tl.load(partial_state + at * 2, mask=is_split, other=LOWEST)
    totals = tl.load(partial_state + at * 2 + 1, mask=is_split, other=0.0)
    best = tl.max(bests, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        best = tl.maximum(best, sink)
    weights = tl.where(is_split, tl.exp2(bests - best), 0.0)
    total = tl.sum(weights * totals, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - best)
    mask = is_split[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    attended = tl.sum(parts * weights[:, None], axis=0) / tl.where(length > 0, total, 1.0)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + dims, attended.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(
    do_not_specialize=["window", "num_slots"],
    do_not_specialize_on_alignment=["block_tables", "extents"],
)
def prefill_kernel(
    query,  # (rows, heads, head_dim), strided
    slots,  # (2 × kv_heads × slots, head_dim)
    scales,  # (2 × kv_heads × slots,), float32; unused without IS_FP8
    block_tables,  # int64: the block tables of all chunks, end to end
    extents,  # (chunks, 4), int64: first row, tokens, first token's position, index of its block table
    sinks,  # (heads,); unused without HAS_SINKS
    out,  # (rows, heads, head_dim)
    scaling,
    softcap,
    window,
    num_slots,
    row_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens per program
    ROWS: tl.constexpr,  # GROUP × TOKENS, padded to a power of 2
    TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Compute the causal attention of each chunk's tokens to their own context: out = softmax(scores) · values.

    Grid: (ceil(longest chunk / TOKENS), chunks, KV_HEADS). Programs past the end of a chunk do nothing. Assumes that
    the chunk's own keys and values are in the cache.
    """
    chunk, kv_head = tl.program_id(1), tl.program_id(2)
    num_tokens = tl.load(extents + chunk * 4 + 1).to(tl.int32)
    first_token = tl.program_id(0) * TOKENS
    if first_token < num_tokens:
        first_row = tl.load(extents + chunk * 4) + first_token
        first_position = tl.load(extents + chunk * 4 + 2).to(tl.int32) + first_token
        table = block_tables + tl.load(extents + chunk * 4 + 3)
        count = tl.minimum(TOKENS, num_tokens - first_token)
        packed, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
        token = packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        is_query = (token < count)[:, None] & (dims < HEAD_DIM)[None, :]
        places = (first_row + token) * row_stride + head * head_stride
        queries = tl.load(query + places[:, None] + dims[None, :], mask=is_query, other=0.0)
        position = first_position + token
        best = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if HAS_SINKS:
            best = tl.load(sinks + head).to(tl.float32) * LOG2_E
            total += 1.0
        acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        last = first_position + count
        start = last * 0
        if HAS_WINDOW:
            start = tl.maximum(first_position + 1 - window, 0) // TILE * TILE
        if not HAS_WINDOW:  # tiles that every token of the program sees as a whole
            whole = (first_position + 1) // TILE * TILE
            for tile in range(start, whole, TILE):
                positions = tile + tl.arange(0, TILE)
                keys, values, key_scales, value_scales = load_tile(
                    slots,
                    scales,
                    table,
                    positions,
                    True,
                    kv_head,
                    num_slots,
                    True,
                    BLOCK_SIZE,
                    HEAD_DIM,
                    PADDED_DIM,
                    KV_HEADS,
                    IS_FP8,
                    DOT_DTYPE,
                )
                scores = score(queries, keys, key_scales, scaling, softcap, HAS_SOFTCAP, IS_FP8, DOT_DTYPE)
                best, total, acc = accumulate(
                    best, total, acc, scores, True, values, value_scales, True, IS_FP8, DOT_DTYPE
                )
            start = whole
        for tile in range(start, last, TILE):
            positions = tile + tl.arange(0, TILE)
            is_key = positions < last
            keys, values, key_scales, value_scales = load_tile(
                slots,
                scales,
                table,
                positions,
                is_key,
                kv_head,
                num_slots,
                False,
                BLOCK_SIZE,
                HEAD_DIM,
                PADDED_DIM,
                KV_HEADS,
                IS_FP8,
                DOT_DTYPE,
            )
            seen = is_key[None, :] & (positions[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen = seen & (positions[None, :] > position[:, None] - window)
            scores = score(queries, keys, key_scales, scaling, softcap, HAS_SOFTCAP, IS_FP8, DOT_DTYPE)
            best, total, acc = accumulate(
                best, total, acc, scores, seen, values, value_scales, False, IS_FP8, DOT_DTYPE
            )
        attended = acc / tl.where(total > 0, total, 1.0)[:, None]
        where = ((first_row + token) * (KV_HEADS * GROUP) + head) * HEAD_DIM
        tl.store(out + where[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=is_query)
