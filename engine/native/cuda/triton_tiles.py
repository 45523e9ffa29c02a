"""The steps of the attention kernels on one tile of keys: load it from paged KV, score it, add it to a running softmax.

Knows a tile's rows and columns; does not know contexts, chunks or grids.

With IS_FP8, the cache has codes of float8_e4m3fn, and `scales` (2 × kv_heads × slots,). Codes are unpacked by shifts,
which any GPU can, and enter the products; the scales of keys multiply scores, and those of values multiply weights.
"""

# mypy: ignore-errors
# Triton's language has types of its own.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # lowest score; not -inf, because -inf - -inf is NaN


@triton.jit
def _from_fp8(codes):
    """Return 2⁻⁸ times the numbers of these codes of float8_e4m3fn (uint8), exactly, as float16.

    The exponents of the two formats differ by 8. There is no NaN: a row with one has NaN as its scale.
    """
    bits = codes.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def score(
    queries,
    keys,
    key_scales,
    scaling,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Return the scores times log2(e): (rows, keys), float32. Keys and `key_scales` are those of `load_tile`.

    The scores are s = scaling · (queries · keysᵀ), or softcap · tanh(s / softcap) with HAS_SOFTCAP.
    """
    scores = tl.dot(queries.to(DOT_DTYPE), tl.trans(keys.to(DOT_DTYPE)), input_precision="ieee")
    if IS_FP8:
        scores = scores * key_scales[None, :]
    if HAS_SOFTCAP:
        squared = tl.exp2(scores * scaling / softcap * (2.0 * LOG2_E))
        return softcap * (1.0 - 2.0 / (squared + 1.0)) * LOG2_E  # tanh
    return scores * (scaling * LOG2_E)


@triton.jit
def accumulate(
    best,
    total,
    acc,
    scores,
    seen,
    values,
    value_scales,
    ALL_SEEN: tl.constexpr,
    IS_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Add one tile of keys to a running softmax (online softmax; Milakov and Gimelshein 2018); return its new state.

    The state per row is the highest score `best`, total = Σ 2^(score - best), and acc = Σ 2^(score - best) · value. A
    row that sees no key of the tile keeps its state. With ALL_SEEN, every row sees every key, and `seen` is not used.
    """
    if not ALL_SEEN:
        scores = tl.where(seen, scores, LOWEST)
    highest = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None])
    if not ALL_SEEN:
        weights = tl.where(seen, weights, 0.0)
    shrink = tl.exp2(best - highest)
    total = total * shrink + tl.sum(weights, axis=1)
    if IS_FP8:
        weights = weights * value_scales[None, :]
    product = tl.dot(weights.to(values.dtype).to(DOT_DTYPE), values.to(DOT_DTYPE), input_precision="ieee")
    acc = acc * shrink[:, None] + product
    return highest, total, acc


@triton.jit
def load_tile(
    slots,
    scales,
    table,
    positions,
    is_key,
    kv_head,
    num_slots,
    ALL_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    IS_FP8: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Return the keys and values at `positions` (keys,) of the context with this block table: (keys, PADDED_DIM) each.

    Their scales (keys,) follow; without IS_FP8, whatever follows is not used. With ALL_KEYS, every position has a key,
    and `is_key` is not used; zeros are in the place of other keys.
    """
    dims = tl.arange(0, PADDED_DIM)
    if ALL_KEYS:
        block = tl.load(table + positions // BLOCK_SIZE)
    else:
        block = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0)
    slot = kv_head.to(tl.int64) * num_slots + block * BLOCK_SIZE + positions % BLOCK_SIZE
    keys_at = slots + slot[:, None] * HEAD_DIM + dims[None, :]
    values_at = keys_at + KV_HEADS * num_slots.to(tl.int64) * HEAD_DIM
    if ALL_KEYS and HEAD_DIM == PADDED_DIM:
        keys, values = tl.load(keys_at), tl.load(values_at)
    else:
        mask = dims[None, :] < HEAD_DIM
        if not ALL_KEYS:
            mask = mask & is_key[:, None]
        keys, values = tl.load(keys_at, mask=mask, other=0), tl.load(values_at, mask=mask, other=0)
    key_scales, value_scales = positions, positions
    if IS_FP8:
        values_scale_at = scales + slot + KV_HEADS * num_slots.to(tl.int64)
        if ALL_KEYS:
            key_scales, value_scales = tl.load(scales + slot), tl.load(values_scale_at)
        else:
            key_scales = tl.load(scales + slot, mask=is_key, other=0.0)
            value_scales = tl.load(values_scale_at, mask=is_key, other=0.0)
        keys, values = _from_fp8(keys).to(DOT_DTYPE), _from_fp8(values).to(DOT_DTYPE)
        key_scales, value_scales = key_scales * 256.0, value_scales * 256.0
    return keys, values, key_scales, value_scales
