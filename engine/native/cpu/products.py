"""Linear layers computed by products.h, on processors that multiply bfloat16. Weights are packed once.

Knows weights and addresses; does not know the model around them. A product is one call into C++. The module
`packed_linear` does the same with oneDNN.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.native.model.fused_layer import concatenate_linears
from engine.native.model.quantized import QuantizedLinear

PANEL = 16  # outputs of a panel; the same as kPanel in linear.h


class LinearArguments(ctypes.Structure):
    """The ctypes counterpart of the struct `Linear` in linear.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("inner", ctypes.c_int64),
    ]


class PackedWeight:
    """The concatenated weights (out, in) of linear layers, bfloat16 or int8, packed in panels (see linear.h)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Concatenate and pack the weights of `layers`. Raises `ValueError` if they do not fit panels."""
        joined = concatenate_linears(layers)
        self.out_features, self.in_features = joined.out_features, joined.in_features
        if not fits_panels(joined) or joined.weight.dtype is not torch.bfloat16:
            raise ValueError(f"a {joined.weight.dtype} weight of {tuple(joined.weight.shape)} does not fit panels")
        self._bias = None if joined.bias is None else joined.bias.detach()
        bias = None if self._bias is None else self._bias.data_ptr()
        weight: int | None = None
        codes, scales = weight, weight
        if isinstance(joined, QuantizedLinear):
            self._panels, self._scales = self._packed(joined.codes.view(torch.uint8) ^ 0x80), joined.scales
            codes, scales = self._panels.data_ptr(), self._scales.data_ptr()
        else:
            self._panels = self._packed(joined.weight.detach())
            weight = self._panels.data_ptr()
        self.arguments = LinearArguments(weight, codes, scales, bias, self.out_features, self.in_features)

    def _packed(self, weight: Tensor) -> Tensor:
        together = _inputs_together(weight.dtype)
        panels = weight.view(self.out_features // PANEL, PANEL, self.in_features // together, together)
        return panels.transpose(1, 2).contiguous()


class Products:
    """The matrix products of the C++ library. `available` tells whether the library has any."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = library.linear_bfloat16
        self._linear.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int]
        self._linear.restype = None

    @staticmethod
    def available(library: ctypes.CDLL | None, dtype: torch.dtype) -> bool:
        """Return whether the library has products for `dtype`; switch AMX tiles on if the processor has them.

        Return False if the processor has tiles but Linux does not grant them. oneDNN is the better choice then, since
        it requests the tiles in another way.
        """
        if library is None or dtype is not torch.bfloat16 or not library.has_products():
            return False
        return not torch.cpu.get_capabilities().get("amx_bf16", False) or bool(library.use_tiles(True))

    def multiply(self, rows: Tensor, weight: PackedWeight) -> Tensor:
        """Return the product (T, out) of `rows` (T, in) and `weight`. `rows` must be bfloat16 and contiguous."""
        out = rows.new_empty(len(rows), weight.out_features)
        arguments = ctypes.addressof(weight.arguments)
        self._linear(out.data_ptr(), rows.data_ptr(), arguments, len(rows), torch.get_num_threads())
        return out


class PanelLinear(nn.Module):
    """A linear layer that replaces `layer`, and computes the same result from a weight packed in panels."""

    def __init__(self, layer: nn.Linear, products: Products) -> None:
        super().__init__()
        self._weight = PackedWeight([layer])
        self._products = products
        self.in_features, self.out_features = layer.in_features, layer.out_features
        # This weight has only shape and dtype, which modeling code may read. A product with it fails at once.
        self.weight = torch.empty_like(layer.weight, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, out) for `x` (…, in), bfloat16."""
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._products.multiply(rows, self._weight).view(*x.shape[:-1], self.out_features)


def fits_panels(*layers: nn.Linear) -> bool:
    """Return whether the sizes of all `layers` allow packing in panels."""
    return all(
        layer.out_features % PANEL == 0 and layer.in_features % _inputs_together(_kind(layer)) == 0 for layer in layers
    )


def _kind(layer: nn.Linear) -> torch.dtype:
    """Return the dtype of the numbers that a packed weight has."""
    return torch.int8 if isinstance(layer, QuantizedLinear) else layer.weight.dtype


def _inputs_together(kind: torch.dtype) -> int:
    """Return how many inputs of an output are side by side in a panel: what fills 32 bits."""
    return 4 // kind.itemsize
