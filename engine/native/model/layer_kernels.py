"""The interface between a fused decoder layer and a backend's kernels, attention aside.

Knows rows of numbers; does not know layers. All tensors of a call have one dtype, except int64 slot ids.
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
        """Return the norm of each row of `x` (rows, n): (rows, n)."""
        ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Add `x` (rows, n) to `residual` (rows, n) in place; return the norm of the sum, (rows, n)."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) · up, (rows, n); each row of `gate_up` (rows, 2n) holds gate, then up."""
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

        `qkv` is (rows, query_width + 2 · kv_width); row r goes to slot `slot_ids[r]` (int64) of each KV head of `slots`
        (2 × kv_heads × slots, head_dim). `cosines` and `sines` are (rows, rotary_dim). A norm of None is left out.
        """
        ...
