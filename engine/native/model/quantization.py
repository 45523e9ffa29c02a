"""Quantises the linear layers and the experts of a loaded model.

Knows which weights a model uses in a way that can be quantised, and how much each counts; does not know codes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import Quantization
from engine.native.attention.paged import bind
from engine.native.model.grouped_weight import BITS, FINE_SHARE, rounded, stacked
from engine.native.model.loader import MATRICES, context_limit, expert_modules, forward, matrices_of
from engine.native.model.quantized import QuantizedLinear, QuantizedStack

_NUM_TOKENS = 256  # that say how large the inputs of layers are
_ROUTERS = {"gate", "router", "shared_expert_gate"}  # small layers that choose experts: a changed choice changes much


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a model has a weight that can be quantised: a linear layer, or the matrices of experts."""

    parent: Any
    name: str
    importance: Tensor | None  # (in,): see `rounded`

    @property
    def weight(self) -> Tensor:
        """The weight (out, in) of a layer, or the matrices (experts, out, in)."""
        found = getattr(self.parent, self.name)
        return found.weight.detach() if isinstance(found, nn.Linear) else matrices_of(self.parent, self.name)

    def quantize(self, bits: int) -> None:
        """Replace the weight by codes of `bits` bits."""
        found, weight = getattr(self.parent, self.name), self.weight
        if isinstance(found, nn.Linear):
            setattr(self.parent, self.name, QuantizedLinear.of(found, bits, self.importance))
        else:
            whole = stacked([rounded(matrix, bits, self.importance) for matrix in weight])
            replace(self.parent, self.name, QuantizedStack([whole], self.parent))


def replace(experts: nn.Module, name: str, matrices: Any) -> None:
    """Replace the parameter `name` of transformers' `experts`, or what is in its place."""
    delattr(experts, name)
    setattr(experts, name, matrices)


def quantize(model: Any, kind: Quantization, with_experts: bool = True) -> tuple[int, int]:
    """Quantise the linear layers and the experts of `model` that it calls, in place; return the numbers of both.

    Routers are left out. With int4, the output layer gets 8 bits, as do the weights that lose most by 4. Some models
    read a layer's weight and multiply by it themselves. Such a layer is not called, and stays as it is; so do experts
    that cannot be computed one at a time.
    """
    importances = _importances(model, _NUM_TOKENS)
    linears = [
        _Place(parent, name, importances[child])
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child in importances and name not in _ROUTERS
    ]
    experts: list[_Place] = []
    if with_experts and (found := [m for m in expert_modules(model) if m in importances]):
        model.set_experts_implementation("eager")  # a loop over experts
        found = [module for module in found if _takes_one_at_a_time(module)]
        inputs = {"gate_up_proj": importances, "down_proj": dict[nn.Module, Tensor]()}
        experts = [_Place(module, name, inputs[name].get(module)) for module in found for name in MATRICES]
    places, output = [*linears, *experts], model.get_output_embeddings()
    fine = _fine(places, output) if kind == "int4" else set[_Place]()
    for place in places:
        # The plain weight is freed before the next one is read.
        place.quantize(8 if place in fine else BITS[kind])
    return len(linears), len(experts) // len(MATRICES)


class _Taken:
    """Matrices of experts that can only be taken one at a time."""

    def __init__(self, matrices: Tensor) -> None:
        self._matrices = matrices

    def __getitem__(self, index: Any) -> Tensor:
        return self._matrices[int(index)]


@torch.inference_mode()
def _takes_one_at_a_time(experts: Any) -> bool:
    """Return whether `experts` takes its matrices one after another, which is found by trying it."""
    plain = {name: getattr(experts, name) for name in MATRICES}
    first = matrices_of(experts, MATRICES[0])
    x, ids = first.new_ones(2, first.shape[2]), torch.tensor([[0], [len(first) - 1]], device=first.device)
    try:
        for name, matrices in plain.items():
            replace(experts, name, _Taken(matrices))
        experts(x, ids, x[:, :1])
    except Exception:  # it does something else with them
        return False
    finally:
        for name, matrices in plain.items():
            replace(experts, name, matrices)
    return True


def _fine(places: Sequence[_Place], output: nn.Module) -> set[_Place]:
    """Return what has 8 bits in a model with 4: the output layer, and the weights that 4 bits would change most.

    These are at most `FINE_SHARE` of the other weights.
    """
    found = {place for place in places if getattr(place.parent, place.name) is output}
    losses = {place: _loss_of_four_bits(place) for place in places if place not in found}
    room = FINE_SHARE * sum(place.weight.numel() for place in losses)
    for place in sorted(losses, key=losses.__getitem__, reverse=True):
        room -= place.weight.numel()
        if room < 0:
            break
        found.add(place)
    return found


def _loss_of_four_bits(place: _Place) -> float:
    """Return the part of a product's square that codes of 4 bits would change. Estimated from some of the outputs."""
    sample = place.weight.flatten(0, -2)[::8].float()
    importance = sample.new_ones(sample.shape[1]) if place.importance is None else place.importance
    error = rounded(sample, 4, importance).unpacked(torch.float32) - sample
    return float((error.square() @ importance).sum() / (sample.square() @ importance).sum().clamp(min=1e-30))


def called_modules(model: Any) -> set[nn.Module]:
    """Return the linear layers that a forward pass calls, and the experts."""
    return set(_importances(model, 2))


@torch.inference_mode()
def _importances(model: Any, num_tokens: int) -> dict[nn.Module, Tensor]:
    """Return the linear layers and experts that a forward pass calls, with the mean squares (in,) of their inputs.

    The pass computes random tokens, each of which attends only to itself: which inputs are large depends little on the
    text. A model that fails here fails in the probe, too, which says why.
    """
    found: dict[nn.Module, Tensor] = {}

    def attend_to_oneself(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)

    def note(module: nn.Module, args: tuple[Tensor, ...], _: Any) -> None:
        if not args:
            return
        squares = args[0].detach().float().flatten(0, -2).square().mean(dim=0)
        found[module] = squares + 1e-6 * squares.mean() + 1e-30

    noted = [*(m for m in model.modules() if type(m) is nn.Linear), *expert_modules(model)]
    handles = [module.register_forward_hook(note) for module in noted]
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
