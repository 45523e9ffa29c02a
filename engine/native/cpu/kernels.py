"""The layers' and attention's C++ kernels as calls on tensors.

Knows memory addresses and shapes; not layers or sequences, and not how the library came about (`build`).
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.model.layer_kernels import Norm

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_MAX_HEAD_DIM = 512  # kMaxDim of attention.cpp
_MAX_GROUP = 64  # kMaxGroup
_PREFILL_HEAD_DIMS = (16, 32, 64, 96, 128)  # for which paged_prefill has loops of their own

_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm": [_P, _P, _P, _I, _I, _F, _T],
    "add_rms_norm": [_P, _P, _P, _P, _I, _I, _F, _T],
    "silu_and_mul": [_P, _P, _I, _I, _T],
    "rotate_and_write": [_P, _P, _P, _P, _P, _P, _P, _F, _I, _I, _I, _I, _I, _I, _T],
    "paged_prefill": [_P, _P, _I, _I, _P, _I, _P, _P, _I, _P, _I, _I, _I, _I, _F, _F, _I, _T],
    "paged_decode": [_P, _P, _I, _I, _P, _I, _P, _I, _P, _P, _I, _I, _I, _I, _I, _F, _F, _I, _T],
}


class CpuKernels:
    """Calls for one dtype. Tensors are contiguous unless said otherwise."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        """Raises `ValueError` for a dtype that there are no kernels for."""
        if dtype not in _DTYPES:
            raise ValueError(f"no kernels for {dtype}")
        self._calls: dict[str, Callable[..., None]] = {}
        for name, signature in _SIGNATURES.items():
            function = getattr(library, f"{name}_{_DTYPES[dtype]}")
            function.argtypes, function.restype = signature, None
            self._calls[name] = function

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        return dtype in _DTYPES

    @staticmethod
    def can_attend(shape: HeadShape) -> bool:
        group = shape.num_query_heads // shape.num_kv_heads
        return shape.head_dim <= _MAX_HEAD_DIM and group <= _MAX_GROUP

    @staticmethod
    def can_prefill(shape: HeadShape) -> bool:
        return shape.head_dim in _PREFILL_HEAD_DIMS and CpuKernels.can_attend(shape)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """(rows, n) in and out."""
        out = torch.empty_like(x)
        rows, n = x.shape
        weight = norm.weight.data_ptr()
        self._calls["rms_norm"](out.data_ptr(), x.data_ptr(), weight, rows, n, norm.eps, _num_threads())
        return out

    def add_rms_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        """Adds x to `residual`, in place, and gives the norm of the sum; (rows, n) all."""
        out = torch.empty_like(x)
        rows, n = x.shape
        self._calls["add_rms_norm"](
            out.data_ptr(),
            residual.data_ptr(),
            x.data_ptr(),
            norm.weight.data_ptr(),
            rows,
            n,
            norm.eps,
            _num_threads(),
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """(rows, 2n) to (rows, n): silu of the first half times the second."""
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._calls["silu_and_mul"](out.data_ptr(), gate_up.data_ptr(), rows, width // 2, _num_threads())
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
    ) -> None:
        """Norms and rotates queries and keys of `qkv` (rows, query + 2 × kv widths) in place, and copies keys and
        values to `slot_ids` (rows,) of `slots` (2 × kv_heads × slots, head_dim). `cosines` and `sines`: (rows, rotary
        dim)."""
        if qkv.shape[1] != shape.query_width + 2 * shape.kv_width or slots.shape[1] != shape.head_dim:
            raise ValueError(f"rows of {qkv.shape[1]} and slots of {slots.shape[1]} numbers do not go with {shape}")
        self._calls["rotate_and_write"](
            qkv.data_ptr(),
            slots.data_ptr(),
            slot_ids.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            query_norm.weight.data_ptr() if query_norm else None,
            key_norm.weight.data_ptr() if key_norm else None,
            query_norm.eps if query_norm else 0.0,
            len(qkv),
            len(slots) // (2 * shape.num_kv_heads),
            shape.num_query_heads,
            shape.num_kv_heads,
            shape.head_dim,
            cosines.shape[-1],
            _num_threads(),
        )

    def paged_decode(self, query: Tensor, num_kv_heads: int, paged: PagedRows, scoring: Scoring) -> Tensor:
        """Attention of `query` (heads, rows, head_dim), strided but for its last dimension, each row to its own
        context: (rows, heads, head_dim)."""
        heads, rows, head_dim = query.shape
        _check(query, num_kv_heads, paged.slots)
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        out = query.new_empty(rows, heads, head_dim)
        self._calls["paged_decode"](
            out.data_ptr(),
            query.data_ptr(),
            query.stride(1),
            query.stride(0),
            paged.slots.data_ptr(),
            len(paged.slots) // (2 * num_kv_heads),
            paged.block_table.data_ptr(),
            paged.block_table.stride(0),
            paged.context_lens.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            rows,
            heads,
            num_kv_heads,
            head_dim,
            paged.block_size,
            scoring.scaling,
            scoring.softcap or 0.0,
            scoring.window or 0,
            _num_threads(),
        )
        return out

    def paged_prefill(self, query: Tensor, num_kv_heads: int, chunks: PagedChunks, scoring: Scoring) -> Tensor | None:
        """The rows of each chunk against its context and, causally, each other: (rows, heads, head_dim). None where the
        kernel has no loops for the head size."""
        heads, rows, head_dim = query.shape
        if head_dim not in _PREFILL_HEAD_DIMS:
            return None
        _check(query, num_kv_heads, chunks.slots)
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        out = query.new_empty(rows, heads, head_dim)
        self._calls["paged_prefill"](
            out.data_ptr(),
            query.data_ptr(),
            query.stride(1),
            query.stride(0),
            chunks.slots.data_ptr(),
            len(chunks.slots) // (2 * num_kv_heads),
            chunks.block_tables.data_ptr(),
            chunks.extents.data_ptr(),
            len(chunks.extents),
            None if sinks is None else sinks.data_ptr(),
            heads,
            num_kv_heads,
            head_dim,
            chunks.block_size,
            scoring.scaling,
            scoring.softcap or 0.0,
            scoring.window or 0,
            _num_threads(),
        )
        return out


def _check(query: Tensor, num_kv_heads: int, slots: Tensor) -> None:
    if slots.shape[1] != query.shape[2] or query.shape[0] % num_kv_heads:
        raise ValueError(f"{tuple(query.shape)} queries do not go with this cache and its {num_kv_heads} KV heads")


def _num_threads() -> int:
    return torch.get_num_threads()
