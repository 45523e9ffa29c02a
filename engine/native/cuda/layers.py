"""Call the layers' Triton kernels on tensors.

Knows shapes; does not know the kernels' arithmetic or the layers that use them.
"""

import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape
from engine.native.cuda.triton_layers import activate_and_mul_kernel, rms_norm_kernel, rotate_and_write_kernel
from engine.native.model.layer_kernels import Activation, Norm

_TILE = 1024  # numbers per program
_TILE_HEADS = 8  # heads per program


class TritonLayerKernels:
    """The Triton implementation of `LayerKernels`, which describes the calls. No call waits for the device."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        return _rms_norm(x, None, norm)

    def add_rms_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        return _rms_norm(x, residual, norm)

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        activate_and_mul_kernel[(rows, -(-(width // 2) // _TILE))](
            gate_up, out, N=width // 2, TILE=_TILE, ACTIVATION=int(activation)
        )
        return out

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
        if qkv.shape[1] != shape.query_width + 2 * shape.kv_width or slots.shape[1] != shape.head_dim:
            raise ValueError(f"rows of {qkv.shape[1]} and slots of {slots.shape[1]} numbers do not fit {shape}")
        queries, keys, _ = torch.split(qkv, [shape.query_width, shape.kv_width, shape.kv_width], dim=1)
        query_norm = _norm_of_a_head(queries, query_norm, shape.head_dim)
        key_norm = _norm_of_a_head(keys, key_norm, shape.head_dim)
        rotate_and_write_kernel[(len(qkv), -(-(shape.num_query_heads + shape.num_kv_heads) // _TILE_HEADS))](
            qkv,
            slots,
            qkv if scales is None else scales,
            slot_ids,
            cosines,
            sines,
            query_norm.weight if query_norm else qkv,
            key_norm.weight if key_norm else qkv,
            query_norm.eps if query_norm else 0.0,
            key_norm.eps if key_norm else 0.0,
            len(slots) // (2 * shape.num_kv_heads),
            HEADS=shape.num_query_heads,
            KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=shape.head_dim,
            PADDED_DIM=_power_of_2(shape.head_dim),
            ROTARY=cosines.shape[-1],
            TILE=_TILE_HEADS,
            HAS_QUERY_NORM=query_norm is not None,
            HAS_KEY_NORM=key_norm is not None,
            ROUNDS=query_norm is None or query_norm.rounds,
            IN_PAIRS=in_pairs,
            IS_FP8=scales is not None,
        )


def _norm_of_a_head(heads: Tensor, norm: Norm | None, head_dim: int) -> Norm | None:
    """Return `norm` if it normalises each head alone. Else normalise all `heads` (rows, width) at once, in place."""
    if norm is None or len(norm.weight) == head_dim:
        return norm
    heads.copy_(_rms_norm(heads.contiguous(), None, norm))
    return None


def _rms_norm(x: Tensor, residual: Tensor | None, norm: Norm) -> Tensor:
    """Return `x` (rows, n) with each row normalised by `norm`.

    If `residual` (rows, n) is given, add `x` to it in place and return the normalised sum instead.
    """
    out = torch.empty_like(x)
    rows, n = x.shape
    rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        norm.weight,
        out,
        norm.eps,
        N=n,
        PADDED_N=_power_of_2(n),
        HAS_RESIDUAL=residual is not None,
        ROUNDS=norm.rounds,
        num_warps=8 if n > _TILE else 4,
    )
    return out


def _power_of_2(size: int) -> int:
    """Return the smallest power of 2 that is at least `size`."""
    return 1 << (size - 1).bit_length()
