"""What the MLP of a decoder layer computes, as data: one gated MLP for all rows, or experts of which each row has some.

Knows which modules and tensors the MLPs of transformers' models have; does not know the layer around them, or how they
are computed. What a router or an activation computes is found by trying it on a few numbers.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from engine.native.model.layer_kernels import Activation
from engine.native.model.loader import MATRICES, matrices_of
from engine.native.model.quantized import (
    QuantizedLinear,
    QuantizedStack,
    concatenate_linears,
    linear_of,
    some_inputs,
    some_outputs,
)

_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))  # the second as in Phi-3
_SHARED = {"shared_expert", "shared_expert_gate"}
_BLOCKS = ({"gate", "experts"}, {"router", "experts"}, {"gate", "experts", *_SHARED})
_ACTIVATION_ERROR = 1e-4  # largest error of an activation that is recognised: GELU's approximation differs by more
_SHARE_ERROR = 0.01  # largest relative error (norm) of a router's shares that are recognised: some are bfloat16


@dataclass(frozen=True, slots=True)
class Mlp:
    """An MLP: down(activation(gate, up)), with gate and up from `gate_up`."""

    gate_up: Sequence[nn.Linear]
    down: nn.Linear
    activation: Activation

    @property
    def linears(self) -> Sequence[nn.Linear]:
        return (*self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum of share · expert(x) over a row's experts. Each expert is an MLP, and all have the same sizes.

    A row has the `chosen` experts of its highest router logits. Their shares are e^logit, divided by the sum of these
    over the chosen experts if `normalises`, else over all. A shared expert counts as `always` experts, which every row
    has; their share is the sigmoid of one more logit.
    """

    block: Any  # of transformers: the router and the experts
    router: nn.Module
    chosen: int
    always: int
    normalises: bool
    activation: Activation
    is_interleaved: bool  # whether the outputs of gate and up alternate in the block's weights

    @property
    def count(self) -> int:
        return self._own + self.always

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.block.experts.down_proj.dtype
        return dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the number of inputs of an expert, and of its activations."""
        down = self._linear("down_proj", 0)
        return down.out_features, down.in_features

    @property
    def is_quantized(self) -> bool:
        """Return whether any of the matrices is."""
        kinds = QuantizedStack, QuantizedLinear
        return any(isinstance(module, kinds) for module in self.block.modules())

    def router_linear(self) -> nn.Linear:
        """Return the layer that computes the logits: the router's and, with a shared expert, the one of its share."""
        router: Any = self.router
        bias = getattr(router, "bias", None)
        if not self.always:
            return linear_of(router.weight.detach(), bias)
        return linear_of(torch.cat((router.weight.detach(), self.block.shared_expert_gate.weight.detach())), None)

    def gate_ups(self) -> Iterator[nn.Linear]:
        """Yield a layer of each expert, whose outputs are the gates and then the ups."""
        for index in range(self._own):
            linear = self._linear("gate_up_proj", index)
            order = torch.arange(linear.out_features).view(-1, 2).T.flatten()
            yield some_outputs(linear, order) if self.is_interleaved else linear
        width, block = self.sizes[1], self.block
        for index in range(self.always):
            gate, up = (
                some_outputs(linear, slice(index * width, (index + 1) * width))
                for linear in (block.shared_expert.gate_proj, block.shared_expert.up_proj)
            )
            yield concatenate_linears([gate, up])

    def downs(self) -> Iterator[nn.Linear]:
        """Yield a layer of each expert, from its activations to its outputs."""
        for index in range(self._own):
            yield self._linear("down_proj", index)
        width, block = self.sizes[1], self.block
        for index in range(self.always):
            yield some_inputs(block.shared_expert.down_proj, index * width, width)

    @property
    def _own(self) -> int:
        """The number of experts among which the router chooses."""
        return len(self.block.experts.down_proj)

    def _linear(self, name: str, index: int) -> nn.Linear:
        """Return a layer with one of the matrices of the block's own experts, and its bias."""
        experts = self.block.experts
        weight, biases = getattr(experts, name), getattr(experts, f"{name}_bias", None)
        bias = None if biases is None else biases.detach()[index]
        if isinstance(weight, QuantizedStack):
            return QuantizedLinear(weight.expert(index), bias, weight.dtype)
        return linear_of(matrices_of(experts, name)[index], bias)


def mlp_of(block: nn.Module) -> Mlp | Experts | None:
    """Return what `block`, the MLP of a layer, computes; None if it has other parts."""
    gate_up = only_choice(_GATE_UP, block, {"down_proj"})
    if gate_up is None:
        return _experts_of(block)
    activation = _activation_of(getattr(block, "act_fn", None) or getattr(block, "activation_fn", None))
    linears: Any = (*gate_up, block.down_proj)
    if activation is None or not all(map(is_plain_linear, linears)):
        return None
    return Mlp(gate_up, linears[-1], activation)


def children_of(module: nn.Module) -> set[str]:
    """Return the names of a module's parts that compute something."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}


def only_choice(choices: Iterable[Sequence[str]], module: nn.Module, others: set[str]) -> list[Any] | None:
    """Return the modules of the one choice that `module` has; None if it has children other than these and `others`."""
    names = children_of(module) - {"act_fn", "activation_fn"}
    for choice in choices:
        if set(choice) <= names <= {*choice, *others}:
            return [getattr(module, name) for name in choice]
    return None


def is_plain_linear(module: Any) -> bool:
    """Return whether `module` is one of our quantised layers, or an unchanged linear layer with a plain weight."""
    if type(module) is QuantizedLinear:
        return True
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _experts_of(block: Any) -> Experts | None:
    if (names := children_of(block)) not in _BLOCKS:
        return None
    stacks = [name for name, child in block.experts.named_children() if isinstance(child, QuantizedStack)]
    found = {*stacks, *(name for name, _ in block.experts.named_parameters())}
    if found != {*MATRICES} and found != {*MATRICES, *(f"{name}_bias" for name in MATRICES)}:
        return None
    router = block.gate if "gate" in names else block.router
    routing, gating = _routing_of(router), _gating_of(block.experts)
    if routing is None or gating is None or any(type(p) is not nn.Parameter for p in block.parameters()):
        return None
    experts = Experts(block, router, routing[0], 0, routing[1], *gating)
    return _with_shared(experts) if names >= _SHARED else experts


def _with_shared(experts: Experts) -> Experts | None:
    """Return `experts` with the shared expert of their block; None if it cannot be cut into such experts."""
    block: Any = experts.block
    shared, gate = mlp_of(block.shared_expert), block.shared_expert_gate
    if not isinstance(shared, Mlp) or len(shared.gate_up) != 2 or shared.activation is not experts.activation:
        return None
    if type(gate) is not nn.Linear or any(linear.bias is not None for linear in (*shared.linears, gate)):
        return None
    always, rest = divmod(shared.down.in_features, experts.sizes[1])
    has_biases = any(name.endswith("bias") for name, _ in block.named_parameters())
    return None if rest or has_biases or gate.out_features != 1 else replace(experts, always=always)


@torch.inference_mode()
def _routing_of(router: Any) -> tuple[int, bool] | None:
    """Return how many experts `router` chooses, and whether it normalises their shares; None if it does otherwise."""
    parameters = dict(router.named_parameters())
    if not {"weight"} <= parameters.keys() <= {"weight", "bias"}:
        return None
    x = torch.randn(8, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(router.weight)
    logits = nn.functional.linear(x, **parameters).float()
    with suppress(Exception):  # such as one that returns something else
        _, shares, ids = router(x)
        given = logits.gather(1, ids)
        best = logits.topk(ids.shape[1]).values
        if not torch.equal(given.sort(descending=True).values, best):
            return None
        expected = [(given - total.logsumexp(dim=1, keepdim=True)).exp() for total in (logits, best)]
        errors = [float((shares - e).norm() / e.norm()) for e in expected]
        if min(errors) <= _SHARE_ERROR:
            return ids.shape[1], errors[1] <= errors[0]
    return None


@torch.inference_mode()
def _gating_of(experts: Any) -> tuple[Activation, bool] | None:
    """Return the activation of `experts`, and whether gates and ups alternate; None if it is another one."""
    if not hasattr(experts, "_apply_gate"):
        return None
    gate, up = (t.flatten() for t in torch.meshgrid(torch.linspace(-9, 9, 61), torch.linspace(-9, 9, 7), indexing="ij"))
    for activation, alternate in product(Activation, (False, True)):
        found = experts._apply_gate(torch.stack((gate, up), dim=-1).flatten() if alternate else torch.cat((gate, up)))
        if torch.allclose(activation(gate, up), found, rtol=0, atol=_ACTIVATION_ERROR):
            return activation, alternate
    return None


@torch.inference_mode()
def _activation_of(function: Any) -> Activation | None:
    gate = torch.linspace(-6, 6, 101)
    if not callable(function):
        return None
    found = function(gate)
    one = torch.ones(())
    return next((a for a in Activation if bool((a(gate, one) - found).abs().max() <= _ACTIVATION_ERROR)), None)
