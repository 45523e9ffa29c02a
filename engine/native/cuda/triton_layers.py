"""What a decoder layer does between its products and attention, as Triton kernels.

Knows rows of numbers; not layers. A model's own modules take some forty launches for it, each of which reads and writes
the rows again. Results are rounded where transformers' modules round them.
"""

# mypy: ignore-errors
# Triton's language has types of its own.

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, n, eps, dtype):
    """Root-mean-square norm of float32 numbers, rounded as in the model: before the weight and after."""
    mean = tl.sum(x * x, axis=0) / n
    return (x * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32) * weight


@triton.jit
def rms_norm_kernel(
    x,  # (rows, n)
    residual,  # (rows, n): gets x added to it; or anything
    weight,  # (n,)
    out,  # (rows, n)
    eps,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Programs: (row)."""
    places = tl.arange(0, PADDED_N)
    mask = places < N
    at = tl.program_id(0).to(tl.int64) * N + places
    row = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        row += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        total = row.to(residual.dtype.element_ty)
        tl.store(residual + at, total, mask=mask)
        row = total.to(tl.float32)
    weights = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    normed = _normed(row, weights, N, eps, out.dtype.element_ty)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(
    gate_up,  # (rows, 2n)
    out,  # (rows, n)
    N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Programs: (row, tile of numbers)."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = places < N
    gate = tl.load(gate_up + row * 2 * N + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + places, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * N + places, (activated * up).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_ids"])
def rotate_and_write_kernel(
    qkv,  # (rows, (heads + 2 × kv_heads) × head_dim): queries and keys are changed in place
    slots,  # (2 × kv_heads × slots, head_dim)
    slot_ids,  # (rows,)
    cosines,  # (rows, rotary)
    sines,
    query_weight,  # (head_dim,) or anything
    key_weight,
    query_eps,
    key_eps,
    num_slots,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
):
    """Programs: (row, query head or KV head); that of a KV head copies its values, too."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = qkv.dtype.element_ty
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    is_turned = dims < ROTARY
    # Each number turns with the one that lies half of the rotary dimensions away.
    partners = tl.where(dims < ROTARY // 2, dims + ROTARY // 2, dims - ROTARY // 2)
    partners = tl.where(is_turned, partners, dims)
    first = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    x = tl.load(first + dims, mask=is_dim, other=0.0).to(tl.float32)
    y = tl.load(first + partners, mask=is_dim, other=0.0).to(tl.float32)
    # Every partner is loaded before any is overwritten.
    tl.debug_barrier()
    if (head < HEADS) & HAS_QUERY_NORM:
        mine = tl.load(query_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
        theirs = tl.load(query_weight + partners, mask=is_dim, other=0.0).to(tl.float32)
        y = _normed(y, theirs, HEAD_DIM, query_eps, dtype).to(dtype).to(tl.float32)
        x = _normed(x, mine, HEAD_DIM, query_eps, dtype).to(dtype).to(tl.float32)
    if (head >= HEADS) & HAS_KEY_NORM:
        mine = tl.load(key_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
        theirs = tl.load(key_weight + partners, mask=is_dim, other=0.0).to(tl.float32)
        y = _normed(y, theirs, HEAD_DIM, key_eps, dtype).to(dtype).to(tl.float32)
        x = _normed(x, mine, HEAD_DIM, key_eps, dtype).to(dtype).to(tl.float32)
    cosine = tl.load(cosines + row * ROTARY + dims, mask=is_turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + row * ROTARY + dims, mask=is_turned, other=0.0).to(tl.float32)
    turned = x * cosine + tl.where(dims < ROTARY // 2, -y, y) * sine
    tl.store(first + dims, turned.to(dtype), mask=is_dim)
    if head >= HEADS:
        kv_head = (head - HEADS).to(tl.int64)
        slot = (kv_head * num_slots + tl.load(slot_ids + row)) * HEAD_DIM
        tl.store(slots + slot + dims, turned.to(dtype), mask=is_dim)
        value = tl.load(first + KV_HEADS * HEAD_DIM + dims, mask=is_dim, other=0.0)
        tl.store(slots + KV_HEADS * num_slots.to(tl.int64) * HEAD_DIM + slot + dims, value, mask=is_dim)
