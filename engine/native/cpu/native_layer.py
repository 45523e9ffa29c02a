"""A common decoder layer in one C++ call (decoder_layer.cpp), on processors that multiply bfloat16.

Knows how a layer's weights and a step are passed to C++. The C++ code computes the same as `FusedDecoderLayer`, which
needs eight calls.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from engine.native.attention.kernels import Scoring
from engine.native.attention.paged import PagedAttention
from engine.native.batch.layer_boundary import compact_rows
from engine.native.batch.tensors import StepTensors
from engine.native.cpu.kernels import CpuKernels
from engine.native.cpu.products import LinearArguments, PackedWeight, fits_panels
from engine.native.model.fused_layer import head_shape, norm_of
from engine.native.model.layer_kernels import Norm

# C types of the fields: a pointer, an Index, a float, an int32.
_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


class _NormArguments(ctypes.Structure):
    _fields_ = [("weight", _P), ("eps", _F)]


class _HeadsArguments(ctypes.Structure):
    _fields_ = [("query", _I), ("kv", _I), ("dim", _I), ("rotary", _I)]


class _ScoringArguments(ctypes.Structure):
    _fields_ = [("scaling", _F), ("softcap", _F), ("window", _I)]


class _LayerArguments(ctypes.Structure):
    """The ctypes counterpart of the struct `Layer` in decoder_layer.cpp."""

    _fields_ = [
        *((name, LinearArguments) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _NormArguments) for name in ("input", "mlp", "query", "key")),
        ("heads", _HeadsArguments),
        ("scoring", _ScoringArguments),
        ("cache", _P),
        ("num_slots", _I),
        ("block_size", _I),
    ]


class _StepArguments(ctypes.Structure):
    """The ctypes counterpart of the struct `Step` in decoder_layer.cpp."""

    _fields_ = [
        ("rows", _I),
        ("cosines", _P),
        ("sines", _P),
        ("slots", _P),
        ("decode_rows", _I),
        ("block_table", _P),
        ("table_stride", _I),
        ("lengths", _P),
        ("num_chunks", _I),
        ("chunk_tables", _P),
        ("chunks", _P),
        ("threads", _T),
    ]


class SharedStep:
    """The C++ arguments of a step, which all layers of a forward pass share. They are filled once per step."""

    def __init__(self) -> None:
        self._step: StepTensors | None = None
        self._positions: tuple[Tensor, Tensor] | None = None
        self._arguments = _StepArguments()
        self._kept: tuple[Tensor, ...] = ()

    def address(self, step: StepTensors, position_embeddings: tuple[Tensor, Tensor]) -> int:
        """Return the address of the C++ arguments of `step`.

        `position_embeddings` are cosines and sines, (1, T, rotary) each.
        """
        if step is not self._step or position_embeddings is not self._positions:
            self._step, self._positions = step, position_embeddings
            self._fill(step, position_embeddings)
        return ctypes.addressof(self._arguments)

    @property
    def rotary_dim(self) -> int:
        return int(self._kept[0].shape[-1])

    def _fill(self, step: StepTensors, position_embeddings: tuple[Tensor, Tensor]) -> None:
        """Fill the C++ arguments; cosines and sines are converted to bfloat16, (T, rotary) each."""
        cosines, sines = (step.own_rows(t[0]).to(torch.bfloat16).contiguous() for t in position_embeddings)
        self._kept = (cosines, sines)  # keeps these tensors alive: C++ has only their addresses
        arguments = self._arguments
        arguments.rows, arguments.slots = len(step.slot_ids), step.slot_ids.data_ptr()
        arguments.cosines, arguments.sines = cosines.data_ptr(), sines.data_ptr()
        arguments.decode_rows = arguments.num_chunks = 0
        for group in step.decode_groups:  # at most one group on a CPU
            arguments.decode_rows, arguments.table_stride = group.num_seqs, group.block_table.stride(0)
            arguments.block_table, arguments.lengths = group.block_table.data_ptr(), group.context_lens.data_ptr()
        if step.prefills is not None:
            arguments.num_chunks = len(step.prefills.chunks)
            arguments.chunk_tables, arguments.chunks = step.prefills.tables.data_ptr(), step.prefills.extents.data_ptr()
        arguments.threads = torch.get_num_threads()


class NativeDecoderLayer(nn.Module):
    """A decoder layer that replaces `layer`. Input and output are (1, T, hidden), bfloat16.

    The residual stream is changed in place.
    """

    def __init__(self, layer: Any, attention: PagedAttention, library: ctypes.CDLL, step: SharedStep) -> None:
        super().__init__()
        attn, mlp = layer.self_attn, layer.mlp
        self.attention_type = getattr(layer, "attention_type", None)  # some models read this attribute to choose a mask
        self._attention = attention
        self._step = step
        self._shape = head_shape(layer)
        self._weights = {
            "qkv": PackedWeight([attn.q_proj, attn.k_proj, attn.v_proj]),
            "out": PackedWeight([attn.o_proj]),
            "gate_up": PackedWeight([mlp.gate_proj, mlp.up_proj]),
            "down": PackedWeight([mlp.down_proj]),
        }
        self._norms = {"input": norm_of(layer.input_layernorm), "mlp": norm_of(layer.post_attention_layernorm)}
        if hasattr(attn, "q_norm"):
            self._norms |= {"query": norm_of(attn.q_norm), "key": norm_of(attn.k_norm)}
        scoring = attention.scoring(int(attn.layer_idx), float(attn.scaling))
        self._arguments = self._describe(int(attn.layer_idx), scoring)
        self._compute = library.decoder_layer_bfloat16
        self._compute.argtypes, self._compute.restype = [_P, _P, _P], None

    @staticmethod
    def supports(layer: Any) -> bool:
        """Return whether the C++ code is compiled for the sizes of `layer`. The layer must be fusable."""
        attn, mlp = layer.self_attn, layer.mlp
        linears = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        return fits_panels(*linears) and CpuKernels.can_prefill(head_shape(layer))

    def _describe(self, layer_idx: int, scoring: Scoring) -> _LayerArguments:
        """Return the C++ arguments of the layer; `forward` sets the rotary dimension."""
        shape, cache = self._shape, self._attention.layer(layer_idx)
        arguments = _LayerArguments(**{name: weight.arguments for name, weight in self._weights.items()})
        for name, norm in self._norms.items():
            setattr(arguments, name, _norm_arguments(norm))
        arguments.heads = _HeadsArguments(shape.num_query_heads, shape.num_kv_heads, shape.head_dim, 0)
        arguments.scoring = _ScoringArguments(scoring.scaling, scoring.softcap or 0.0, scoring.window or 0)
        arguments.cache = cache.slots.data_ptr()
        arguments.num_slots = len(cache.slots) // (2 * shape.num_kv_heads)
        arguments.block_size = self._attention.block_size
        return arguments

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """Compute the layer on `hidden_states` (1, T, hidden) in place.

        `position_embeddings` are cosines and sines, (1, T, rotary) each.
        """
        if (remaining := self._attention.enter_layer()) is not None:
            compact_rows(hidden_states[0], remaining)
        step = self._step.address(self._attention.step, position_embeddings)
        self._arguments.heads.rotary = self._step.rotary_dim
        self._compute(hidden_states.data_ptr(), ctypes.addressof(self._arguments), step)
        return hidden_states


def _norm_arguments(norm: Norm) -> _NormArguments:
    return _NormArguments(norm.weight.data_ptr(), norm.eps)
