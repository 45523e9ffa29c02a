"""A decoder layer in one C++ call (decoder_layer.cpp), on processors that multiply bfloat16.

Knows how a layer's weights and a step are passed to C++. The C++ code computes the same as `FusedDecoderLayer`, which
needs eight to ten calls.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.native.attention.paged import PagedAttention
from engine.native.batch.tensors import StepTensors
from engine.native.cpu.huge_pages import Keep
from engine.native.cpu.kernels import CpuKernels, NormArguments, norm_arguments
from engine.native.cpu.products import PANEL, LinearArguments, PackedWeight, fits_panels
from engine.native.model.grouped_weight import GROUP
from engine.native.model.layer_parts import LayerForm, LayerParts, Rotation
from engine.native.model.mlp_parts import Experts, Mlp
from engine.native.model.quantized import linear_of

# C types of the fields: a pointer, an Index, a float, an int32.
_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


_LINEARS = ("qkv", "out", "gate_up", "down", "router")
_NORMS = ("input", "attended", "mlp", "computed", "query", "key")


class _ExpertsArguments(ctypes.Structure):
    _fields_ = [
        ("count", _I),
        ("chosen", _I),
        ("always", _I),
        ("normalises", _T),
        ("gate_up", ctypes.POINTER(LinearArguments)),
        ("down", ctypes.POINTER(LinearArguments)),
    ]


class _HeadsArguments(ctypes.Structure):
    _fields_ = [("query", _I), ("kv", _I), ("dim", _I), ("rotary", _I), ("in_pairs", _T)]


class _ScoringArguments(ctypes.Structure):
    _fields_ = [("scaling", _F), ("softcap", _F), ("window", _I)]


class _LayerArguments(ctypes.Structure):
    """The ctypes counterpart of the struct `Layer` in decoder_layer.cpp."""

    _fields_ = [
        *((name, LinearArguments) for name in _LINEARS),
        *((name, NormArguments) for name in _NORMS),
        ("experts", _ExpertsArguments),
        ("heads", _HeadsArguments),
        ("scoring", _ScoringArguments),
        ("sinks", _P),
        ("activation", _T),
        ("residual_scale", _F),
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

    def address(self, step: StepTensors, position_embeddings: tuple[Tensor, Tensor], rotation: Rotation) -> int:
        """Return the address of the C++ arguments of `step`, for layers with this rotation, the same in all layers.

        `position_embeddings` are the model's cosines and sines, (1, T, angles) each.
        """
        if step is not self._step or position_embeddings is not self._positions:
            self._step, self._positions = step, position_embeddings
            self._fill(step, position_embeddings, rotation)
        return ctypes.addressof(self._arguments)

    @property
    def rotary_dim(self) -> int:
        return int(self._kept[0].shape[-1])

    def _fill(self, step: StepTensors, position_embeddings: tuple[Tensor, Tensor], rotation: Rotation) -> None:
        """Fill the C++ arguments; cosines and sines are converted to bfloat16, (T, rotary) each."""
        cosines, sines = (rotation.twice(t[0].to(torch.bfloat16)).contiguous() for t in position_embeddings)
        self._kept = (cosines, sines)  # keeps these tensors alive: C++ has only their addresses
        arguments = self._arguments
        arguments.rows, arguments.slots = len(step.slot_ids), step.slot_ids.data_ptr()
        arguments.cosines, arguments.sines = cosines.data_ptr(), sines.data_ptr()
        arguments.decode_rows = arguments.num_chunks = 0
        for group in step.decode_groups:  # at most one group on a CPU
            arguments.decode_rows, arguments.table_stride = group.num_seqs, group.block_table.stride(0)
            arguments.block_table, arguments.lengths = group.block_table.data_ptr(), group.context_lens.data_ptr()
        if step.prefills is not None:
            arguments.num_chunks = len(step.prefills.extents)
            arguments.chunk_tables, arguments.chunks = step.prefills.tables.data_ptr(), step.prefills.extents.data_ptr()
        arguments.threads = torch.get_num_threads()


class NativeDecoderLayer(nn.Module):
    """A decoder layer with the `parts` of another one. Input and output are (1, T, hidden), bfloat16.

    The residual stream is changed in place.
    """

    def __init__(
        self, parts: LayerParts, attention: PagedAttention, library: ctypes.CDLL, step: SharedStep, keep: Keep
    ) -> None:
        super().__init__()
        self.attention_type = parts.form.attention_type
        self._attention = attention
        self._step = step
        self._form = parts.form  # also keeps the weights of norms alive: C++ has only their addresses
        self._weights = {"qkv": PackedWeight(parts.qkv, keep), "out": PackedWeight([parts.out], keep)}
        self.has_experts = isinstance(parts.mlp, Experts)
        if isinstance(parts.mlp, Mlp):
            self._weights["gate_up"] = PackedWeight(parts.mlp.gate_up, keep)
            self._weights["down"] = PackedWeight([parts.mlp.down], keep)
        elif isinstance(parts.mlp, Experts):
            self._gate_ups = [PackedWeight([linear], keep) for linear in parts.mlp.gate_ups()]
            self._downs = [PackedWeight([linear], keep) for linear in parts.mlp.downs()]
            self._weights["router"] = PackedWeight([_padded(parts.mlp.router_linear())], keep)
        self._arguments = self._describe(parts.form)
        self._describe_mlp(parts.mlp)
        self._compute = library.decoder_layer_bfloat16
        self._compute.argtypes, self._compute.restype = [_P, _P, _P], None

    @staticmethod
    def supports(parts: LayerParts) -> bool:
        """Return whether the C++ code is compiled for the sizes of the layer."""
        if isinstance(parts.mlp, Experts):
            step = GROUP if parts.mlp.is_quantized else PANEL
            fits = not any(size % step for size in parts.mlp.sizes) and parts.mlp.dtype is torch.bfloat16
        else:
            fits = parts.mlp is not None
        return fits and fits_panels(*parts.linears) and CpuKernels.can_prefill(parts.form.shape)

    def _describe(self, form: LayerForm) -> _LayerArguments:
        """Return the C++ arguments of the layer without its MLP; `forward` sets the rotary dimension."""
        shape, cache = form.shape, self._attention.layer(form.layer_idx)
        scoring = self._attention.scoring(form.layer_idx, form.scaling, form.softcap)
        arguments = _LayerArguments(**{name: weight.arguments for name, weight in self._weights.items()})
        for name in _NORMS:
            setattr(arguments, name, norm_arguments(getattr(form, f"{name}_norm")))
        in_pairs = form.rotation is not None and form.rotation.in_pairs
        arguments.heads = _HeadsArguments(shape.num_query_heads, shape.num_kv_heads, shape.head_dim, 0, in_pairs)
        arguments.scoring = _ScoringArguments(scoring.scaling, scoring.softcap or 0.0, scoring.window or 0)
        arguments.sinks = None if form.sinks is None else form.sinks.data_ptr()
        arguments.residual_scale = form.residual_scale
        arguments.cache = cache.slots.data_ptr()
        arguments.num_slots = len(cache.slots) // (2 * shape.num_kv_heads)
        arguments.block_size = self._attention.block_size
        return arguments

    def _describe_mlp(self, mlp: Mlp | Experts | None) -> None:
        """Add the MLP to the C++ arguments."""
        assert mlp is not None, "see `supports`"
        self._arguments.activation = mlp.activation
        if isinstance(mlp, Experts):
            weights = _table(self._gate_ups), _table(self._downs)
            self._arguments.experts = _ExpertsArguments(mlp.count, mlp.chosen, mlp.always, mlp.normalises, *weights)

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """Compute the layer on `hidden_states` (1, T, hidden) in place.

        `position_embeddings` are cosines and sines, (1, T, angles) each.
        """
        self._attention.enter_layer()
        rotation = self._form.rotation
        step = self._step.address(self._attention.step, position_embeddings, rotation or Rotation())
        self._arguments.heads.rotary = self._step.rotary_dim if rotation else 0
        self._compute(hidden_states.data_ptr(), ctypes.addressof(self._arguments), step)
        return hidden_states


def _table(weights: Sequence[PackedWeight]) -> Any:
    """Return the C++ arguments of the weights beside each other. The weights must stay alive."""
    return (LinearArguments * len(weights))(*(weight.arguments for weight in weights))


def _padded(linear: nn.Linear) -> nn.Linear:
    """Return `linear` with further outputs of 0, so that they fill whole panels."""
    more = -linear.out_features % PANEL
    bias = None if linear.bias is None else pad(linear.bias.detach(), (0, more))
    return linear_of(pad(linear.weight.detach(), (0, 0, 0, more)), bias)
