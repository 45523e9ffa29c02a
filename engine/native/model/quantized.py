"""Linear layers with int8 weights: symmetric, with one scale for each output. Only weights are quantised.

Knows linear layers and which of them a model calls; does not know how a backend multiplies int8 numbers fast.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor, nn

from engine.native.attention.paged import bind
from engine.native.model.loader import forward

_LARGEST = 127  # code of the largest weight of an output; -128 is not used
_ROUTERS = {"gate", "router", "shared_expert_gate"}  # small layers that choose experts: a changed choice changes much


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is codes · scales. `forward` is the definition of what faster products compute.

    The codes are exact in every dtype of activations, so a product rounds its result only.
    """

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Take `codes` (out, in), int8, `scales` (out,), float32, and `bias` (out,), in `dtype`."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = codes.shape
        self.codes, self.scales = nn.Buffer(codes), nn.Buffer(scales)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        # This weight has only shape and dtype, which modeling code may read. A product with it fails at once.
        self.weight = torch.empty(codes.shape, dtype=dtype, device="meta")

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """Return `linear` with a quantised weight. An output whose weights are all 0 stays 0."""
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(dim=1) / _LARGEST
        codes = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(codes.clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales, bias, linear.weight.dtype)

    @classmethod
    def joined(cls, layers: "Sequence[QuantizedLinear]") -> Self:
        """Return one layer whose output is the concatenation of the outputs of `layers`."""
        codes, scales = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("codes", "scales"))
        return cls(codes, scales, joined_biases(layers, codes.device), layers[0].weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, out) for `x` (…, in)."""
        product = nn.functional.linear(x, self.codes.to(x.dtype)).float() * self.scales
        return (product if self.bias is None else product + self.bias).to(x.dtype)


def joined_biases(layers: Sequence[nn.Linear], device: torch.device) -> Tensor | None:
    """Return the biases of `layers`, end to end; None if no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    dtype = layers[0].weight.dtype
    none = [torch.zeros(layer.out_features, dtype=dtype, device=device) for layer in layers]
    return torch.cat([zeros if la.bias is None else la.bias.detach() for la, zeros in zip(layers, none, strict=True)])


def quantize(model: Any) -> int:
    """Quantise the linear layers of `model` that it calls, in place; return their number. Routers are left out.

    Some models read a layer's weight and multiply by it themselves. Such a layer is not called, and stays as it is.
    """
    called = _called_linears(model)
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if child in called and name not in _ROUTERS
    ]
    for parent, name, child in places:
        setattr(parent, name, QuantizedLinear.of(child))  # the plain weight is freed before the next one is read
    return len(places)


@torch.inference_mode()
def _called_linears(model: Any) -> set[nn.Module]:
    """Return the linear layers that a forward pass on two rows calls.

    A model that fails here fails in the probe, too, which says why.
    """
    called: set[nn.Module] = set()

    def attend_to_oneself(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    def note(linear: nn.Module, *_: Any) -> None:
        called.add(linear)

    handles = [m.register_forward_hook(note) for m in model.modules() if type(m) is nn.Linear]
    bind(model, attend_to_oneself)
    try:
        positions = torch.arange(2, device=next(model.parameters()).device)
        with suppress(Exception):
            forward(model, positions[None] + 1, positions[None], positions)
    finally:
        for handle in handles:
            handle.remove()
    return called
