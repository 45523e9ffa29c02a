"""Linear layers and experts with weights of 4 or 8 bits by groups. Only weights are quantised.

Knows layers, plain and quantised, and how to cut and join them; does not know models, or how a backend multiplies codes
fast.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from engine.native.model.grouped_weight import GroupedWeight, joined, rounded
from engine.native.model.loader import is_transposed


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantised weight. `forward` is the definition of what faster products compute.

    The weight has one part or several of different kinds, below each other.
    """

    def __init__(self, parts: Sequence[GroupedWeight], bias: Tensor | None, dtype: torch.dtype) -> None:
        """Take the parts of the weight, and `bias` (out,), in `dtype`."""
        nn.Module.__init__(self)
        self._parts = nn.ModuleList(parts)
        self.out_features, self.in_features = sum(part.out_features for part in parts), parts[0].in_features
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        # This weight has only shape and dtype, which modeling code may read. A product with it fails at once.
        self.weight = torch.empty((self.out_features, self.in_features), dtype=dtype, device="meta")

    @property
    def parts(self) -> list[GroupedWeight]:
        return [part for part in self._parts if isinstance(part, GroupedWeight)]

    @classmethod
    def of(cls, linear: nn.Linear, bits: int, importance: Tensor | None = None) -> Self:
        """Return `linear` with its weight rounded to codes of `bits` bits; see `rounded`."""
        bias = None if linear.bias is None else linear.bias.detach()
        return cls([rounded(linear.weight, bits, importance)], bias, linear.weight.dtype)

    @classmethod
    def joined(cls, layers: "Sequence[QuantizedLinear]") -> Self:
        """Return one layer whose output is the concatenation of the outputs of `layers`."""
        parts = joined([part for layer in layers for part in layer.parts])
        return cls(parts, joined_biases(layers, parts[0].codes.device), layers[0].weight.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in) in `dtype`."""
        return torch.cat([part.unpacked(dtype) for part in self.parts])

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, out) for `x` (…, in)."""
        return nn.functional.linear(x, self.unpacked(x.dtype), self.bias)


def some_outputs(linear: nn.Linear, which: slice | Tensor) -> nn.Linear:
    """Return the layer with some of the outputs of `linear`, or with its outputs in another order."""
    bias = None if linear.bias is None else linear.bias.detach()[which]
    if not isinstance(linear, QuantizedLinear):
        return linear_of(linear.weight.detach()[which], bias)
    (part,) = linear.parts
    return QuantizedLinear([part.rows(which)], bias, linear.weight.dtype)


def some_inputs(linear: nn.Linear, first: int, number: int) -> nn.Linear:
    """Return the layer without a bias that has `number` of the inputs of `linear` from `first` on."""
    if not isinstance(linear, QuantizedLinear):
        return linear_of(linear.weight.detach()[:, first : first + number], None)
    return QuantizedLinear([part.inputs(first, number) for part in linear.parts], None, linear.weight.dtype)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with `weight` (out, in) and `bias` (out,)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def joined_biases(layers: Sequence[nn.Linear], device: torch.device) -> Tensor | None:
    """Return the biases of `layers`, end to end; None if no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    dtype = layers[0].weight.dtype
    none = [torch.zeros(layer.out_features, dtype=dtype, device=device) for layer in layers]
    return torch.cat([zeros if la.bias is None else la.bias.detach() for la, zeros in zip(layers, none, strict=True)])


def concatenate_linears(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Return one linear layer whose output is the concatenation of the outputs of `layers`, all of the same kind."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if quantized:
        return QuantizedLinear.joined(quantized)
    return linear_of(*concatenated(layers))


def concatenated(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weights (out, in) and biases (out,) of `layers`, end to end; None if no layer has a bias."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return weight, joined_biases(layers, weight.device)


class QuantizedStack(nn.Module):
    """The quantised matrices of all experts, in place of transformers' parameter: (experts, out, in), or transposed.

    An index gives one of them unpacked, as the parameter does. So transformers' loop over the chosen experts is the
    definition of what faster products compute. Each part has some of the outputs of every expert, one expert's after
    another's.
    """

    def __init__(self, parts: Sequence[GroupedWeight], experts: Any) -> None:
        """Take the parts, for transformers' `experts`, which still have their parameters."""
        super().__init__()
        self._parts = nn.ModuleList(parts)
        count, self.dtype = len(experts.down_proj), experts.down_proj.dtype
        self._count, self._is_transposed = count, is_transposed(experts)
        self.out_features, self.in_features = sum(p.out_features for p in parts) // count, parts[0].in_features

    def __len__(self) -> int:
        return self._count

    def expert(self, index: int) -> list[GroupedWeight]:
        """Return the parts of the matrix (out, in) of one expert."""
        parts = [part for part in self._parts if isinstance(part, GroupedWeight)]
        sizes = [part.out_features // self._count for part in parts]
        return [part.rows(slice(index * n, (index + 1) * n)) for part, n in zip(parts, sizes, strict=True)]

    def __getitem__(self, index: Any) -> Tensor:
        weight = torch.cat([part.unpacked(self.dtype) for part in self.expert(int(index))])
        return weight.T if self._is_transposed else weight
