"""What a fused decoder layer asks of a backend's kernels, besides attention. Knows rows of numbers; not layers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.native.attention.kernels import HeadShape


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight (n,) of a root-mean-square norm."""

    weight: Tensor
    eps: float


class LayerKernels(Protocol):
    """Tensors are contiguous."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """(rows, n) in and out."""
        ...

    def add_rms_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Adds x to `residual`, in place, and gives the norm of the sum; (rows, n) all."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """(rows, 2n) to (rows, n): silu of the first half times the second."""
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
        """Norms and rotates queries and keys of `qkv` (rows, query + 2 × kv widths) in place, and copies keys and
        values to `slot_ids` (rows,) of `slots` (2 × kv_heads × slots, head_dim). `cosines` and `sines`: (rows, rotary
        dim)."""
        ...
