"""Call the C++ kernels for layers and attention on tensors.

Knows memory addresses and shapes; does not know layers, sequences or how the library is compiled (`build`).
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from engine.native.attention.kernels import HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.model.layer_kernels import Activation, Norm

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_MAX_HEAD_DIM = 512  # the same as kMaxDim in attention.h
_MAX_GROUP = 64  # query heads per KV head; the same as kMaxGroup in attention.h
PREFILL_HEAD_DIMS = (16, 32, 64, 96, 128, 256)  # head sizes for which paged_prefill is compiled

# C types of the kernels' arguments: a pointer, an Index, a float, a number of threads.
_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class NormArguments(ctypes.Structure):
    """The ctypes counterpart of the struct `Norm` in layers.h."""

    _fields_ = [("weight", _P), ("eps", _F), ("rounds", ctypes.c_int32), ("n", _I)]


_N = NormArguments
_SIGNATURES = {
    "rms_norm": [_P, _P, _N, _I, _I, _T],
    "add_rms_norm": [_P, _P, _P, _N, _I, _I, _T],
    "activate_and_mul": [_P, _P, _I, _I, _T, _T],
    "rotate_and_write": [_P, _P, _P, _P, _P, _N, _N, _I, _I, _I, _I, _I, _I, _T, _T],
    "paged_prefill": [_P, _P, _I, _I, _P, _I, _P, _P, _I, _P, _I, _I, _I, _I, _F, _F, _I, _T],
    "paged_decode": [_P, _P, _I, _I, _P, _I, _P, _I, _P, _P, _I, _I, _I, _I, _I, _F, _F, _I, _T],
}


class CpuKernels:
    """The implementation of `AttentionKernels` and `LayerKernels`, which describe the calls, for a CPU and one dtype.

    Tensors must be contiguous, unless a method's docstring says otherwise.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        """Look up the kernels for `dtype` in `library`. Raises `ValueError` if there are no kernels for `dtype`."""
        if dtype not in _DTYPES:
            raise ValueError(f"there are no kernels for {dtype}: use float32 or bfloat16")
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
        """Return whether `paged_prefill` is compiled for layers of this shape."""
        return shape.head_dim in PREFILL_HEAD_DIMS and CpuKernels.can_attend(shape)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(x)
        rows, n = x.shape
        self._calls["rms_norm"](out.data_ptr(), x.data_ptr(), norm_arguments(norm), rows, n, _num_threads())
        return out

    def add_rms_norm(self, residual: Tensor, x: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(x)
        rows, n = x.shape
        self._calls["add_rms_norm"](
            out.data_ptr(), residual.data_ptr(), x.data_ptr(), norm_arguments(norm), rows, n, _num_threads()
        )
        return out

    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._calls["activate_and_mul"](
            out.data_ptr(), gate_up.data_ptr(), rows, width // 2, activation, _num_threads()
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
        if scales is not None:
            raise ValueError("the C++ kernels write no FP8")
        self._calls["rotate_and_write"](
            qkv.data_ptr(),
            slots.data_ptr(),
            slot_ids.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            norm_arguments(query_norm),
            norm_arguments(key_norm),
            len(qkv),
            len(slots) // (2 * shape.num_kv_heads),
            shape.num_query_heads,
            shape.num_kv_heads,
            shape.head_dim,
            cosines.shape[-1],
            in_pairs,
            _num_threads(),
        )

    def paged_decode(self, query: Tensor, num_kv_heads: int, paged: PagedRows, scoring: Scoring) -> Tensor:
        """Implements `AttentionKernels.paged_decode`. Only the last dimension of `query` must be contiguous."""
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
        """Implements `AttentionKernels.paged_prefill`. Only the last dimension of `query` must be contiguous."""
        heads, rows, head_dim = query.shape
        if head_dim not in PREFILL_HEAD_DIMS:
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


def norm_arguments(norm: Norm | None) -> NormArguments:
    """Return the C++ arguments of a norm, whose weight must stay alive; those of None leave the norm out."""
    if norm is None:
        return NormArguments()
    return NormArguments(norm.weight.data_ptr(), norm.eps, norm.rounds, len(norm.weight))


def _check(query: Tensor, num_kv_heads: int, slots: Tensor) -> None:
    """Raises `ValueError` if `query` (heads, rows, head_dim) and `slots` (…, head_dim) do not fit together."""
    if slots.shape[1] != query.shape[2] or query.shape[0] % num_kv_heads:
        raise ValueError(f"queries of shape {tuple(query.shape)} do not fit this cache and its {num_kv_heads} KV heads")


def _num_threads() -> int:
    return torch.get_num_threads()
