"""Linear layers with int8 weights, multiplied by a Triton kernel that reads the codes as they are.

Knows the kernel's shapes and when torch is the better choice. `quantized_fault` tells whether the kernel works here.
"""

import torch
from torch import Tensor, nn

from engine.native.cuda.kernels import dot_dtype
from engine.native.cuda.triton_products import int8_product_kernel
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
        grid = (-(-self.out_features // _TILE["OUTPUTS"]), -(-len(rows) // _TILE["ROWS"]))
        int8_product_kernel[grid](
            rows,
            self.codes,
            self.scales,
            self.scales if self.bias is None else self.bias,
            out,
            len(rows),
            OUT=self.out_features,
            IN=self.in_features,
            HAS_BIAS=self.bias is not None,
            DOT_DTYPE=dot_dtype(rows),
            num_warps=4,
            **_TILE,
        )
        return out.view(*x.shape[:-1], self.out_features)


@torch.inference_mode()
def quantized_fault(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what is wrong with the kernel on `device`; None if it computes what `QuantizedLinear` defines."""
    generator = torch.Generator().manual_seed(1)
    plain = nn.Linear(200, 72, device="meta")
    plain.weight = nn.Parameter(torch.randn(72, 200, generator=generator).to(device, dtype), requires_grad=False)
    plain.bias = nn.Parameter(torch.randn(72, generator=generator).to(device, dtype), requires_grad=False)
    x = torch.randn(19, 200, generator=generator).to(device, dtype)
    found, expected = (kind.of(plain)(x).float() for kind in (KernelLinear, QuantizedLinear))
    allowed = 1e-4 if dtype is torch.float32 else 0.02
    error = float((found - expected).norm() / expected.norm())
    return None if error <= allowed else f"int8 products differ by {error:.3f} from their definition"
