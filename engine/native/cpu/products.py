"""Linear layers by products.h, where the processor multiplies bfloat16: weights packed once, no call between Python and
the product but one.

Knows weights and addresses; not the model around them. `packed_linear` does the same with oneDNN.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.native.model.fused_layer import bias_of

PANEL = 16  # kPanel of linear.h


class LinearArguments(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("inner", ctypes.c_int64),
    ]


class PackedWeight:
    """The weights of linear layers side by side, (out, in) together, in panels."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Raises `ValueError` where `can_pack` would have said no."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias for layer in layers]
        self.out_features, self.in_features = weight.shape
        if self.out_features % PANEL or self.in_features % 2 or weight.dtype is not torch.bfloat16:
            raise ValueError(f"a {weight.dtype} weight of {tuple(weight.shape)} does not go into panels")
        panels = weight.view(self.out_features // PANEL, PANEL, self.in_features // 2, 2)
        self._panels = panels.transpose(1, 2).contiguous()
        self._bias = None if all(b is None for b in biases) else torch.cat([bias_of(layer) for layer in layers])
        bias = None if self._bias is None else self._bias.data_ptr()
        self.arguments = LinearArguments(self._panels.data_ptr(), bias, self.out_features, self.in_features)


class Products:
    """The library's products. `available` says whether it has any."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = library.linear_bfloat16
        self._linear.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int]
        self._linear.restype = None

    @staticmethod
    def available(library: ctypes.CDLL | None, dtype: torch.dtype) -> bool:
        """By tiles from here on where the processor has them (AMX); not where Linux keeps them from us: oneDNN asks
        for them in other ways."""
        if library is None or dtype is not torch.bfloat16 or not library.has_products():
            return False
        return not torch.cpu.get_capabilities().get("amx_bf16", False) or bool(library.use_tiles(True))

    def multiply(self, rows: Tensor, weight: PackedWeight) -> Tensor:
        """(T, in), contiguous, to (T, out)."""
        out = rows.new_empty(len(rows), weight.out_features)
        arguments = ctypes.addressof(weight.arguments)
        self._linear(out.data_ptr(), rows.data_ptr(), arguments, len(rows), torch.get_num_threads())
        return out


class PanelLinear(nn.Module):
    """Computes what `layer` does."""

    def __init__(self, layer: nn.Linear, products: Products) -> None:
        super().__init__()
        self._weight = PackedWeight([layer])
        self._products = products
        self.in_features, self.out_features = layer.in_features, layer.out_features
        # Tells shape and dtype to modeling code that asks for them; whoever multiplies with it fails at once.
        self.weight = torch.empty_like(layer.weight, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out)."""
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._products.multiply(rows, self._weight).view(*x.shape[:-1], self.out_features)


def fits_panels(*layers: nn.Linear) -> bool:
    return all(layer.out_features % PANEL == 0 and layer.in_features % 2 == 0 for layer in layers)
