"""Triton kernels for products and means whose rows are computed alone. Knows matrices; does not know layers."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def quantized_product_kernel(
    x,
    codes,
    scales,
    offsets,
    units,
    bias,
    out,
    num_rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Compute out = x · weightᵀ + bias for x (num_rows, IN) and a `GroupedWeight` (OUT, IN).

    Rows of `out` are STRIDE numbers apart. Grid: (OUT / OUTPUTS, num_rows / ROWS), rounded up. Weights are rounded to
    DOT_DTYPE; sums are float32.
    """
    outputs = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_output, is_row = outputs < OUT, rows < num_rows
    unit = tl.load(units + outputs, mask=is_output, other=0.0)[None, :]
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, IN, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        is_input = inputs < IN
        numbers = tl.load(x + rows[:, None] * IN + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        is_weight = is_output[None, :] & is_input[:, None]
        places = inputs if BITS == 8 else inputs // 32 * 16 + inputs % 16
        row_bytes: tl.constexpr = GROUPS * GROUP * BITS // 8
        read = tl.load(codes + outputs[None, :] * row_bytes + places[:, None], mask=is_weight, other=0).to(tl.int32)
        if BITS == 4:
            read = (read >> (inputs % 32 // 16 * 4)[:, None]) & 15
        groups = outputs[None, :] * GROUPS + (inputs // GROUP)[:, None]
        scale = tl.load(scales + groups, mask=is_weight, other=0.0).to(tl.float32)
        if HAS_OFFSETS:
            offset = tl.load(offsets + groups, mask=is_weight, other=0.0).to(tl.float32)
            weights = (read.to(tl.float32) * scale + offset) * unit
        else:
            weights = (read - (1 << (BITS - 1))).to(tl.float32) * scale * unit
        sums = tl.dot(numbers.to(DOT_DTYPE), weights.to(DOT_DTYPE), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + rows[:, None] * STRIDE + outputs[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x,  # (num_rows, IN)
    weight,  # OUT × IN numbers, strided
    bias,  # (OUT,); unused without HAS_BIAS
    out,  # (num_rows, OUT)
    num_rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    IN_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Compute out = x · weightᵀ + bias, with float32 sums over all inputs in order.

    Grid: (num_rows / ROWS, OUT / OUTPUTS), rounded up: programs of the same weights are neighbours. One compiled
    program serves every number of rows, so a row's bits depend neither on that number nor on the row's place.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < OUT
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, IN, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        is_input = inputs < IN
        is_number, is_weight = is_row[:, None] & is_input[None, :], is_input[:, None] & is_output[None, :]
        numbers = tl.load(x + rows[:, None] * IN + inputs[None, :], mask=is_number, other=0.0)
        places = inputs[:, None] * IN_STRIDE + outputs[None, :] * OUT_STRIDE
        weights = tl.load(weight + places, mask=is_weight, other=0.0)
        sums = tl.dot(numbers.to(DOT_DTYPE), weights.to(DOT_DTYPE), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at = out + rows[:, None] * OUT + outputs[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def mean_kernel(x, out, N: tl.constexpr, PADDED_N: tl.constexpr):
    """Compute the mean of each row of x (rows, N): (rows,). Grid: (rows,)."""
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED_N)
    numbers = tl.load(x + row * N + places, mask=places < N, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(numbers, axis=0) / N).to(out.dtype.element_ty))
