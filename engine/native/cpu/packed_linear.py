"""Linear layers whose weights are packed once into the layout of oneDNN's bfloat16 products.

A plain `nn.Linear` packs its weight in every call. With few rows, packing takes up to three times as long as the
product itself. Knows weights and the packed products that torch offers; does not know the model around them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.native.model.quantized import concatenated

# Largest number of outputs of one product. On the processors measured, wider products run at a third of the speed.
_MAX_WIDTH = 8192
_TYPICAL_ROWS = 32  # rows for which oneDNN chooses the packed layout
# (limit, step): a product of up to `limit` rows is padded to a multiple of `step` rows.
_ROW_STEPS = ((32, 1), (64, 4), (256, 16), (1 << 20, 64))


class PackedLinear(nn.Module):
    """A linear layer that replaces `layers`, which read the same input. Its output is their concatenated outputs."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight, bias = concatenated(layers)
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0]
        # This weight has only shape and dtype, which modeling code may read. A product with it fails at once.
        self.weight = torch.empty_like(weight, device="meta")
        pack = torch.ops.mkldnn._reorder_linear_weight
        self._weights = [pack(part.contiguous(), _TYPICAL_ROWS) for part in _split(weight)]
        self._biases = [None] * len(self._weights) if bias is None else _split(bias)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, out) for `x` (…, in), bfloat16."""
        rows = x.reshape(-1, self.in_features)
        num_rows, num_padded = len(rows), padded_rows(len(rows))
        if num_padded > num_rows:
            padded = rows.new_zeros(num_padded, self.in_features)
            padded[:num_rows] = rows
            rows = padded
        parts = [
            self._multiply(rows, weight, bias, "none", [], "")[:num_rows]
            for weight, bias in zip(self._weights, self._biases, strict=True)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return out.view(*x.shape[:-1], self.out_features)


def padded_rows(num_rows: int) -> int:
    """Return the number of rows to which a product of `num_rows` is padded.

    oneDNN compiles and keeps a program for each number of rows (1 ms and 0.1 MB each), so there must not be thousands
    of different numbers.
    """
    for limit, step in _ROW_STEPS:
        if num_rows <= limit:
            return -(-num_rows // step) * step
    return num_rows


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this torch has packed products for `dtype`, and whether their results are right."""
    if dtype is not torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    plain = nn.Linear(8, 16, bias=False, device="meta")  # random weights would advance torch's generator
    plain.weight = nn.Parameter(torch.linspace(-1, 1, 128, dtype=dtype).view(16, 8), requires_grad=False)
    x = torch.linspace(-1, 1, 24, dtype=dtype).view(3, 8)
    try:
        with torch.inference_mode():
            return torch.allclose(PackedLinear([plain])(x), plain(x), atol=0.02, rtol=0.02)
    except (AttributeError, RuntimeError):  # no such operator in this torch, or none for this processor
        return False


def _split(tensor: Tensor) -> list[Tensor]:
    """Return `tensor` (outputs, …) split into parts of at most `_MAX_WIDTH` outputs."""
    return [tensor[i : i + _MAX_WIDTH] for i in range(0, len(tensor), _MAX_WIDTH)]
