"""Operators of torch replaced by kernels whose rows do not depend on each other, for a whole process.

cuBLAS and torch's reductions choose an algorithm by the number of rows, and the algorithms round differently. Replaced
at torch's dispatcher, any module of transformers uses these kernels, also the output layer. Knows matrices; does not
know models.
"""

import warnings
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.library import Library

from engine.native.cuda.kernels import dot_dtype
from engine.native.cuda.triton_products import mean_kernel, product_kernel

_ALIGNED = 16  # bytes: with another alignment of its inputs, Triton compiles another program
TILE = {"ROWS": 64, "OUTPUTS": 64, "INPUTS": 64}  # numbers of a program
TILE_FLOAT32 = {"ROWS": 32, "OUTPUTS": 32, "INPUTS": 32}  # its products do not use tensor cores
STAGES = 4


def use_exact_operators(key: str = "CUDA") -> Library:
    """Replace the operators for tensors with the dispatch key `key`. They stay replaced while the result is alive."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it had operators of these names
        for name, function in REPLACED.items():
            library.impl(name, function, key)  # type: ignore[no-untyped-call]
    return library


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weight + bias, (rows, out), for `x` (rows, in), `weight` (in, out) and `bias` (out,)."""
    (rows, inner), outputs = x.shape, weight.shape[1]
    x, out = _aligned(x), x.new_empty(rows, outputs)
    tile = TILE_FLOAT32 if x.dtype is torch.float32 else TILE
    product_kernel[(-(-rows // tile["ROWS"]), -(-outputs // tile["OUTPUTS"]))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        OUT=outputs,
        IN=inner,
        OUT_STRIDE=weight.stride(1),
        IN_STRIDE=weight.stride(0),
        HAS_BIAS=bias is not None,
        DOT_DTYPE=dot_dtype(x),
        num_warps=4,
        num_stages=STAGES,
        **tile,
    )
    return out


def _add_product(added: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Implements aten::addmm."""
    if alpha == beta == 1 and added.shape == (weight.shape[1],) and added.is_contiguous():
        return multiply(x, weight, added)
    return alpha * multiply(x, weight) + beta * added


def _multiply_each(x: Tensor, y: Tensor) -> Tensor:
    """Implements aten::bmm: (N, rows, in) and (N, in, out) to (N, rows, out)."""
    if x.shape[2] == 1:  # no sums
        return x * y
    return torch.stack([multiply(*pair) for pair in zip(x, y, strict=True)])


def _mean(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Implements aten::mean.dim."""
    reduced = [d % x.dim() for d in dim] if dim else list(range(x.dim()))
    kept = [d for d in range(x.dim()) if d not in reduced]
    rows = _aligned(x.permute(*kept, *reduced).reshape(prod(x.shape[d] for d in kept), -1))
    out = rows.new_empty(len(rows), dtype=dtype or x.dtype)
    count = rows.shape[1]
    mean_kernel[(len(rows),)](rows, out, N=count, PADDED_N=1 << (count - 1).bit_length(), num_warps=4)
    return out.view([1 if d in reduced else x.shape[d] for d in range(x.dim()) if keepdim or d in kept])


def _aligned(x: Tensor) -> Tensor:
    """Return `x` contiguous, and at an address that the kernels are compiled for."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED else x


REPLACED = {"mm": multiply, "addmm": _add_product, "bmm": _multiply_each, "mean.dim": _mean}
