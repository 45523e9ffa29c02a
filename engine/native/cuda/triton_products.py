"""A Triton kernel for products with quantised weights. Knows matrices; does not know layers."""

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
