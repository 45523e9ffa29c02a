"""Linear layers with weights of 4 or 8 bits by groups. Only weights are quantised.

Knows linear layers and which of them a model calls; does not know how a backend multiplies codes fast.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor, nn

from engine.config import Quantization
from engine.native.attention.paged import bind
from engine.native.model.grouped_weight import BITS, FINE_SHARE, GroupedWeight, joined, rounded
from engine.native.model.loader import context_limit, forward

_NUM_TOKENS = 256  # that say how large the inputs of layers are
_ROUTERS = {"gate", "router", "shared_expert_gate"}  # small layers that choose experts: a changed choice changes much


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


def joined_biases(layers: Sequence[nn.Linear], device: torch.device) -> Tensor | None:
    """Return the biases of `layers`, end to end; None if no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    dtype = layers[0].weight.dtype
    none = [torch.zeros(layer.out_features, dtype=dtype, device=device) for layer in layers]
    return torch.cat([zeros if la.bias is None else la.bias.detach() for la, zeros in zip(layers, none, strict=True)])


def quantize(model: Any, kind: Quantization) -> int:
    """Quantise the linear layers of `model` that it calls, in place; return their number. Routers are left out.

    With int4, the output layer gets 8 bits, as do the layers that lose most by 4. Some models read a layer's weight and
    multiply by it themselves. Such a layer is not called, and stays as it is.
    """
    importances = _importances(model, _NUM_TOKENS)
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if child in importances and name not in _ROUTERS
    ]
    fine: set[nn.Module] = set()
    if kind == "int4":
        fine = _fine_layers({child: importances[child] for *_, child in places}, model.get_output_embeddings())
    for parent, name, child in places:
        bits = 8 if child in fine else BITS[kind]
        # The plain weight is freed before the next one is read.
        setattr(parent, name, QuantizedLinear.of(child, bits, importances[child]))
    return len(places)


def _fine_layers(importances: dict[Any, Tensor], output: nn.Module) -> set[nn.Module]:
    """Return the layers that have 8 bits in a model with 4: the output layer, and those that 4 bits would change most.

    These have at most `FINE_SHARE` of the other layers' weights.
    """
    rest = [linear for linear in importances if linear is not output]
    losses = {linear: _loss_of_four_bits(linear.weight, importances[linear]) for linear in rest}
    room = FINE_SHARE * sum(linear.weight.numel() for linear in rest)
    found = {output}
    for linear in sorted(rest, key=losses.__getitem__, reverse=True):
        room -= linear.weight.numel()
        if room < 0:
            break
        found.add(linear)
    return found


def _loss_of_four_bits(weight: Tensor, importance: Tensor) -> float:
    """Return the part of a product's square that codes of 4 bits would change. Estimated from some of the outputs."""
    sample = weight.detach()[::8].float()
    error = rounded(sample, 4, importance).unpacked(torch.float32) - sample
    return float((error.square() @ importance).sum() / (sample.square() @ importance).sum().clamp(min=1e-30))


def called_linears(model: Any) -> set[nn.Module]:
    """Return the linear layers that a forward pass calls."""
    return set(_importances(model, 2))


@torch.inference_mode()
def _importances(model: Any, num_tokens: int) -> dict[nn.Module, Tensor]:
    """Return the linear layers that a forward pass calls, with the mean squares (in,) of their inputs.

    The pass computes random tokens, each of which attends only to itself: which inputs are large depends little on the
    text. A model that fails here fails in the probe, too, which says why.
    """
    found: dict[nn.Module, Tensor] = {}

    def attend_to_oneself(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    def note(linear: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> None:
        squares = args[0].detach().float().flatten(0, -2).square().mean(dim=0)
        found[linear] = squares + 1e-6 * squares.mean() + 1e-30

    handles = [m.register_forward_hook(note) for m in model.modules() if type(m) is nn.Linear]
    bind(model, attend_to_oneself)
    try:
        device = next(model.parameters()).device
        positions = torch.arange(num_tokens) % (context_limit(model.config) or num_tokens)
        vocab_size = model.get_input_embeddings().num_embeddings
        tokens = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
        with suppress(Exception):
            forward(model, tokens[None].to(device), positions[None].to(device), torch.arange(2, device=device))
    finally:
        for handle in handles:
            handle.remove()
    return found
