"""The interface between a fused decoder layer and a backend's kernels, except the attention kernels.

Knows rows of numbers; does not know layers. All tensors of a call have the same dtype, except slot ids, which are
int64.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.native.attention.kernels import HeadShape


@dataclass(frozen=True, slots=True)
class Norm:
    """Parameters of a root-mean-square norm: norm(x) = x / sqrt(mean(x²) + eps) · weight."""

    weight: Tensor  # (n,)
    eps: float


class LayerKernels(Protocol):
    """A backend's kernels for a decoder layer. All tensors must be contiguous."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return `x` (rows, n) with each row normalised by `norm`, (rows, n)."""
        ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Add `x` (rows, n) to `residual` (rows, n) in place; return the normalised sum, (rows, n)."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up, (rows, n). Each row of `gate_up` (rows, 2n) holds gate, then up."""
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
    ) -> None:
        """Normalise and rotate queries and keys in place, and copy keys and values to the KV cache.

        `qkv` is (rows, query_width + 2 · kv_width). Keys and values of row r are copied to slot `slot_ids[r]` (int64)
        of each KV head of `slots` (2 × kv_heads × slots, head_dim). `cosines` and `sines` are (rows, rotary_dim). If a
        norm is None, its heads are rotated without being normalised.
        """
        ...
