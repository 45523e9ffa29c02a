"""A Triton kernel for products with int8 weights. Knows matrices; does not know layers."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def int8_product_kernel(
    x,
    codes,
    scales,
    bias,
    out,
    num_rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Compute out = x · (codes · scales)ᵀ + bias for x (num_rows, IN), int8 codes (OUT, IN) and float32 scales (OUT,).

    Grid: (OUT / OUTPUTS, num_rows / ROWS), rounded up. Codes are exact in DOT_DTYPE; sums are float32.
    """
    outputs = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_output, is_row = outputs < OUT, rows < num_rows
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, IN, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        is_input = inputs < IN
        numbers = tl.load(x + rows[:, None] * IN + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        weights = tl.load(
            codes + outputs[None, :] * IN + inputs[:, None], mask=is_output[None, :] & is_input[:, None], other=0
        )
        sums = tl.dot(numbers.to(DOT_DTYPE), weights.to(DOT_DTYPE), sums, input_precision="ieee")
    sums *= tl.load(scales + outputs, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + rows[:, None] * OUT + outputs[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )
