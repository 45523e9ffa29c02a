"""The interface between a fused decoder layer and a backend's kernels, except the attention kernels.

Knows rows of numbers; does not know layers. All tensors of a call have the same dtype, except slot ids, which are
int64, and the weights of norms, which are float32.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm: norm(x) = x / sqrt(mean(x²) + eps) · weight, computed in float32.

    With `rounds`, the normalised value is rounded to the dtype of x before it is multiplied by the weight, as in Llama;
    without, only the product is rounded, as in Gemma.
    """

    weight: Tensor  # (n,), float32
    eps: float
    rounds: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows of `x` (…, n) by definition."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return ((normed.to(x.dtype) if self.rounds else normed) * self.weight).to(x.dtype)


class Activation(IntEnum):
    """What an MLP makes of a gate and of the number beside it. The numbers are those of the enum in layers.h."""

    SILU = 0
    GELU_TANH = 1  # GELU in its approximation by a hyperbolic tangent
    CLAMPED = 2  # of gpt-oss: steeper than SiLU, both clamped, and 1 added to the number beside the gate

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activated gate times `up`, by definition."""
        if self is Activation.CLAMPED:
            gate = gate.clamp(max=7)
            return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
        if self is Activation.SILU:
            return torch.nn.functional.silu(gate) * up
        return torch.nn.functional.gelu(gate, approximate="tanh") * up


class LayerKernels(Protocol):
    """A backend's kernels for a decoder layer. All tensors must be contiguous."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return `x` (rows, n) with each row normalised by `norm`, (rows, n)."""
        ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Add `x` (rows, n) to `residual` (rows, n) in place; return the normalised sum, (rows, n)."""
        ...

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate, up), (rows, n). Each row of `gate_up` (rows, 2n) holds gate, then up."""
        ...

    def rotate_and_write(
        self,
        qkv: Tensor,
        shape: HeadShape,
        slots: Tensor,
        slot_ids: Tensor,
        cosines: Tensor,
        sines: Tensor,
        query_norm: Norm | None,
        key_norm: Norm | None,
        in_pairs: bool = False,
        scales: Tensor | None = None,
    ) -> None:
        """Normalise and rotate queries and keys in place, and copy keys and values to the KV cache.

        `qkv` is (rows, query_width + 2 · kv_width). Keys and values of row r are copied to slot `slot_ids[r]` (int64)
        of each KV head of `slots` (2 × kv_heads × slots, head_dim). `cosines` and `sines` are (rows, rotary_dim): each
        angle's twice, one half after the other. Numbers are rotated with the one half of rotary_dim away, or with
        `in_pairs` with the one beside them. A norm has as many numbers as a head, which it normalises alone, or as all
        its heads; if it is None, its heads are rotated without being normalised. `scales` are those of `LayerCache`:
        with them, `slots` gets codes of FP8.
        """
        ...
