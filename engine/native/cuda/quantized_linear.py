"""Quantised linear layers, multiplied by a Triton kernel that reads the codes as they are.

Knows the kernel's shapes and when torch is the better choice. `quantized_fault` tells whether the kernel works here.
"""

import torch
from torch import Tensor

from engine.native.cuda.kernels import dot_dtype
from engine.native.cuda.triton_products import quantized_product_kernel
from engine.native.model.grouped_weight import GroupedWeight, rounded
from engine.native.model.quantized import QuantizedLinear

_MOST_ROWS = 64  # with more rows, unpacking the codes once for torch's own product is little beside that product
_TILE = {"ROWS": 16, "OUTPUTS": 32, "INPUTS": 128}  # numbers of a program


class KernelLinear(QuantizedLinear):
    """A `QuantizedLinear` that uses the kernel for few rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, out) for `x` (…, in)."""
        rows = x.reshape(-1, self.in_features).contiguous()
        if len(rows) > _MOST_ROWS:
            return super().forward(x)
        out = rows.new_empty(len(rows), self.out_features)
        first = 0
        for part in self.parts:
            last = first + part.out_features
            _multiply(out[:, first:last], rows, part, None if self.bias is None else self.bias[first:last])
            first = last
        return out.view(*x.shape[:-1], self.out_features)


def _multiply(out: Tensor, rows: Tensor, weight: GroupedWeight, bias: Tensor | None) -> None:
    """Compute out = rows · weightᵀ + bias for `rows` (T, in) and a part `out` (T, weight.out_features) of a result."""
    grid = (-(-weight.out_features // _TILE["OUTPUTS"]), -(-len(rows) // _TILE["ROWS"]))
    quantized_product_kernel[grid](
        rows,
        weight.codes,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        weight.units,
        weight.units if bias is None else bias,
        out,
        len(rows),
        OUT=weight.out_features,
        IN=weight.in_features,
        STRIDE=out.stride(0),
        GROUPS=weight.scales.shape[1],
        GROUP=weight.group,
        BITS=weight.bits,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=bias is not None,
        DOT_DTYPE=dot_dtype(rows),
        num_warps=4,
        **_TILE,
    )


@torch.inference_mode()
def quantized_fault(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what is wrong with the kernel on `device`; None if it computes what `QuantizedLinear` defines."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(72, 200, generator=generator).to(device)
    bias = torch.randn(144, generator=generator).to(device, dtype)
    x = torch.randn(19, 200, generator=generator).to(device, dtype)
    parts = [rounded(weight, 8), rounded(weight, 4)]
    found, expected = (kind(parts, bias, dtype)(x).float() for kind in (KernelLinear, QuantizedLinear))
    allowed = 1e-4 if dtype is torch.float32 else 0.02
    error = float((found - expected).norm() / expected.norm())
    return None if error <= allowed else f"quantised products differ by {error:.3f} from their definition"
