"""Triton kernels for a decoder layer's work between matrix products and attention: norms, rotation, activation.

Knows rows of numbers; does not know layers. The model's own modules take about forty launches for this work, each of
which reads and writes the rows again. The kernels compute in float32, and round at the same points as transformers'
modules. All tensors are contiguous.
"""

# mypy: ignore-errors
# Triton's language has types of its own.

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, n, eps, dtype, ROUNDS: tl.constexpr):
    """Return x / sqrt(sum(x²) / n + eps) · weight in float32, with ROUNDS rounded to `dtype` before the product.

    `x` is (rows, numbers) and `weight` is (1, numbers); the sum is that of a row.
    """
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / n + eps)
    if ROUNDS:
        normed = normed.to(dtype).to(tl.float32)
    return normed * weight


@triton.jit
def rms_norm_kernel(
    x,  # (rows, n)
    residual,  # (rows, n), in place: x is added to it; unused without HAS_RESIDUAL
    weight,  # (n,), float32
    out,  # (rows, n)
    eps,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Compute out = rms_norm(x) · weight; with HAS_RESIDUAL, residual += x, then out = rms_norm(residual) · weight.

    Grid: (rows,). Assumes that one program holds a whole row of PADDED_N numbers (a power of 2).
    """
    places = tl.arange(0, PADDED_N)[None, :]
    mask = places < N
    at = tl.program_id(0).to(tl.int64) * N + places
    row = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        row += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        total = row.to(residual.dtype.element_ty)
        tl.store(residual + at, total, mask=mask)
        row = total.to(tl.float32)
    weights = tl.load(weight + places, mask=mask, other=0.0)
    normed = _normed(row, weights, N, eps, out.dtype.element_ty, ROUNDS)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def activate_and_mul_kernel(
    gate_up,  # (rows, 2n)
    out,  # (rows, n)
    N: tl.constexpr,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Compute out = activation(gate, up), where each row holds gate, then up. ACTIVATION is an `Activation`'s number.

    SiLU is g / (1 + e^-g). With z = √(2/π) · (g + 0.044715 g³), GELU is g · (1 + tanh z) / 2 = g / (1 + e^-2z).

    Grid: (rows, ceil(N / TILE)).
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = places < N
    gate = tl.load(gate_up + row * 2 * N + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + places, mask=mask, other=0.0).to(tl.float32)
    exponent = gate
    if ACTIVATION == 1:
        exponent = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    if ACTIVATION == 2:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        exponent = 1.702 * gate
    activated = (gate / (1.0 + tl.exp(tl.minimum(-exponent, 80.0)))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * N + places, (activated * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _normed_pairs(x, y, weight, dims, partners, eps, dtype, HEAD_DIM: tl.constexpr, ROUNDS: tl.constexpr):
    """Return normalised heads x (heads, dims), and y, which has the numbers of the same heads at `partners`."""
    mine = tl.load(weight + dims, mask=dims < HEAD_DIM, other=0.0)
    theirs = tl.load(weight + partners, mask=dims < HEAD_DIM, other=0.0)
    normed_x = _normed(x, mine, HEAD_DIM, eps, dtype, ROUNDS).to(dtype).to(tl.float32)
    normed_y = _normed(y, theirs, HEAD_DIM, eps, dtype, ROUNDS).to(dtype).to(tl.float32)
    return normed_x, normed_y


@triton.jit
def _to_fp8(numbers):
    """Return the codes of float8_e4m3fn (uint8) nearest to `numbers` (float32, at most 448); ties go to the even one.

    Numbers from 2⁻⁶ on keep 3 bits of their mantissa, with the exponent moved from bias 127 to bias 7. Smaller ones are
    multiples of 2⁻⁹, which is the step of float32 from 2¹⁴ on.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    code = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (tl.abs(numbers) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(tl.abs(numbers) < 0.015625, small, code) & 0x7F
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write(slots, scales, slot, numbers, is_stored, dims, HEAD_DIM: tl.constexpr, IS_FP8: tl.constexpr):
    """Write `numbers` (rows, dims) to the rows `slot` (rows, 1) of a layer's cache, as `LayerCache.write` does."""
    mask = is_stored & (dims < HEAD_DIM)
    if IS_FP8:
        numbers = tl.where(mask, numbers.to(tl.float32), 0.0)
        scale = tl.maximum(tl.max(tl.abs(numbers), axis=1, keep_dims=True) / 448.0, 1.1754943508222875e-38)
        scale += tl.sum(numbers * 0.0, axis=1, keep_dims=True)  # NaN if a number is: a maximum leaves NaN out
        tl.store(scales + slot, scale, mask=is_stored)
        tl.store(slots + slot * HEAD_DIM + dims, _to_fp8(numbers / scale), mask=mask)
    else:
        tl.store(slots + slot * HEAD_DIM + dims, numbers, mask=mask)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_ids"])
def rotate_and_write_kernel(
    qkv,  # (rows, (heads + 2 × kv_heads) × head_dim): queries and keys are changed in place
    slots,  # (2 × kv_heads × slots, head_dim)
    scales,  # (2 × kv_heads × slots,), float32; unused without IS_FP8
    slot_ids,  # (rows,), int64
    cosines,  # (rows, rotary)
    sines,  # (rows, rotary)
    query_weight,  # (head_dim,), float32; unused without HAS_QUERY_NORM
    key_weight,  # (head_dim,), float32; unused without HAS_KEY_NORM
    query_eps,
    key_eps,
    num_slots,  # per KV head
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    TILE: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Normalise queries and keys, rotate them in place, and write keys and values to the KV cache.

    Of each two numbers x[i] and x[j] with an angle's cosine and sine, x[i] becomes x[i] · cos - x[j] · sin, and x[j]
    becomes x[j] · cos + x[i] · sin. Of angle a, i is a and j is a + ROTARY / 2; IN_PAIRS, 2a and 2a + 1. Cosines and
    sines of all angles are there twice, one half after the other.

    Grid: (rows, ceil((HEADS + KV_HEADS) / TILE)). A program has TILE heads, and also copies the values of its KV heads.
    Assumes that no two rows have the same slot, except padding rows.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype = qkv.dtype.element_ty
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    is_dim = (dims < HEAD_DIM) & (head < HEADS + KV_HEADS)
    is_key = head >= HEADS
    is_turned = dims < ROTARY
    # Each number is rotated together with its partner.
    if IN_PAIRS:
        is_first, partners, angles = dims % 2 == 0, dims ^ 1, dims // 2
    else:
        is_first, angles = dims < ROTARY // 2, dims
        partners = tl.where(is_first, dims + ROTARY // 2, dims - ROTARY // 2)
    partners = tl.where(is_turned, partners, dims)
    first = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    x = tl.load(first + dims, mask=is_dim, other=0.0).to(tl.float32)
    y = tl.load(first + partners, mask=is_dim, other=0.0).to(tl.float32)
    # All threads must load their partners before any thread overwrites them.
    tl.debug_barrier()
    if HAS_QUERY_NORM:
        normed_x, normed_y = _normed_pairs(x, y, query_weight, dims, partners, query_eps, dtype, HEAD_DIM, ROUNDS)
        x, y = tl.where(is_key, x, normed_x), tl.where(is_key, y, normed_y)
    if HAS_KEY_NORM:
        normed_x, normed_y = _normed_pairs(x, y, key_weight, dims, partners, key_eps, dtype, HEAD_DIM, ROUNDS)
        x, y = tl.where(is_key, normed_x, x), tl.where(is_key, normed_y, y)
    cosine = tl.load(cosines + row * ROTARY + angles, mask=is_turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + row * ROTARY + angles, mask=is_turned, other=0.0).to(tl.float32)
    turned = (x * cosine + tl.where(is_first, -y, y) * sine).to(dtype)
    tl.store(first + dims, turned, mask=is_dim)
    is_stored = is_key & (head < HEADS + KV_HEADS)
    slot = (head - HEADS).to(tl.int64) * num_slots + tl.load(slot_ids + row)
    _write(slots, scales, slot, turned, is_stored, dims, HEAD_DIM, IS_FP8)
    value = tl.load(first + KV_HEADS * HEAD_DIM + dims, mask=is_stored & is_dim, other=0.0)
    _write(slots, scales, slot + KV_HEADS * num_slots.to(tl.int64), value, is_stored, dims, HEAD_DIM, IS_FP8)
