"""Linear layers computed by products.h, on processors that multiply bfloat16. Weights are packed once.

Knows weights and addresses; does not know the model around them. A product is one call into C++. The module
`packed_linear` does the same with oneDNN.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.native.cpu.huge_pages import Keep
from engine.native.model.grouped_weight import GROUP, GroupedWeight
from engine.native.model.quantized import QuantizedLinear, concatenate_linears

PANEL = 16  # outputs of a panel; the same as kPanel in linear.h


class _PartArguments(ctypes.Structure):
    """The ctypes counterpart of the struct `Part` in linear.h."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("out", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
    ]


class LinearArguments(ctypes.Structure):
    """The ctypes counterpart of the struct `Linear` in linear.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("parts", ctypes.POINTER(_PartArguments)),
        ("num_parts", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("inner", ctypes.c_int64),
    ]


class PackedWeight:
    """The concatenated weights (out, in) of linear layers, bfloat16 or quantised, packed in panels (see linear.h)."""

    def __init__(self, layers: Sequence[nn.Linear], keep: Keep = Tensor.contiguous) -> None:
        """Concatenate and pack the weights of `layers`, into the memory that `keep` returns.

        Raises `ValueError` if they do not fit panels.
        """
        joined = concatenate_linears(layers)
        self.out_features, self.in_features = joined.out_features, joined.in_features
        if not fits_panels(*layers) or joined.weight.dtype is not torch.bfloat16:
            raise ValueError(f"a {joined.weight.dtype} weight of {tuple(joined.weight.shape)} does not fit panels")
        self._bias = None if joined.bias is None else joined.bias.detach()
        self._keep_in_memory = keep
        self._kept: list[Tensor] = []  # keeps the packed weight alive: C++ has only its address
        weight, parts = None, []
        if isinstance(joined, QuantizedLinear):
            parts = self._packed_parts(joined)
        else:
            weight = self._keep(_panels(joined.weight.detach(), 2))
        bias = None if self._bias is None else self._bias.data_ptr()
        sizes = (self.out_features, self.in_features)
        self.arguments = LinearArguments(weight, _array(parts), len(parts), bias, *sizes)

    def _packed_parts(self, linear: QuantizedLinear) -> list[_PartArguments]:
        first, parts = 0, []
        for part in linear.parts:
            codes = self._keep(_panels(part.separate_codes().flatten(1), 4) if part.bits == 8 else _nibbles(part))
            scales = self._keep(_panels(part.scales, 1))
            offsets = None if part.offsets is None else self._keep(_panels(part.offsets, 1))
            units = self._keep(part.units)
            sizes = (first, part.out_features, part.bits, part.group)
            parts.append(_PartArguments(codes, scales, offsets, units, *sizes))
            first += part.out_features
        return parts

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(self._keep_in_memory(tensor))
        return self._kept[-1].data_ptr()


def _panels(weight: Tensor, together: int) -> Tensor:
    """Return `weight` (out, n) as (out / 16, n / together, 16, together)."""
    return weight.reshape(len(weight) // PANEL, PANEL, -1, together).transpose(1, 2)


def _nibbles(part: GroupedWeight) -> Tensor:
    """Return codes of 4 bits as (out / 16, in / 8, 16, 4) bytes, with the second four inputs in the upper halves."""
    eights = part.separate_codes().reshape(part.out_features // PANEL, PANEL, -1, 2, 4)
    return (eights[..., 0, :] | eights[..., 1, :] << 4).transpose(1, 2)


def _array(parts: list[_PartArguments]) -> Any:
    return (_PartArguments * len(parts))(*parts) if parts else None


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

    def __init__(self, layer: nn.Linear, products: Products, keep: Keep = Tensor.contiguous) -> None:
        super().__init__()
        self._weight = PackedWeight([layer], keep)
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
        layer.out_features % PANEL == 0
        and layer.in_features % (GROUP if isinstance(layer, QuantizedLinear) else 2) == 0
        for layer in layers
    )
