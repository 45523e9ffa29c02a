"""Make a loaded model fast on a CPU: fuse common decoder layers and pack linear layers.

Knows which implementations exist for a dtype and a layer's sizes; `engine.native.startup.fusion` decides whether a
layer may be replaced.
"""

import ctypes
from collections.abc import Callable, Collection, Sequence

import structlog
import torch
from torch import nn

from engine.interface import EngineInfo
from engine.native.cpu.huge_pages import HugePages, Keep
from engine.native.cpu.kernels import CpuKernels
from engine.native.cpu.native_layer import NativeDecoderLayer, SharedStep
from engine.native.cpu.packed_linear import PackedLinear, can_pack
from engine.native.cpu.products import PanelLinear, Products, fits_panels
from engine.native.execution.model_runner import ModelRunner
from engine.native.model.fused_layer import FusedDecoderLayer
from engine.native.model.layer_parts import LayerParts
from engine.native.model.quantized import QuantizedLinear, concatenate_linears
from engine.native.startup.fusion import Replacement, fuse_layers, record_trial_step

LinearReplacement = Callable[[nn.Linear], nn.Module | None]


def optimize_for_cpu(model: nn.Module, runner: ModelRunner, library: ctypes.CDLL | None, info: EngineInfo) -> None:
    """Replace layers of `model` by faster layers, in place; log how many were replaced.

    The engine must have no sequences: the trial writes to its first KV blocks.
    """
    record = record_trial_step(model, runner, info)
    dtype = next(model.parameters()).dtype
    num_fused, keep = 0, HugePages().keep
    if library is not None and CpuKernels.supports(dtype):
        num_fused = fuse_layers(model, runner, _cpu_layers(runner, library, dtype, keep), record.layers)
    num_packed = _replace_linears(model, record.linears, _packing(library, dtype, keep))
    with_experts = sum(isinstance(m, NativeDecoderLayer) and m.has_experts for m in model.modules())
    structlog.get_logger().info(
        "model optimized", fused_layers=num_fused, fused_experts=with_experts, packed_linears=num_packed
    )


def _cpu_layers(runner: ModelRunner, library: ctypes.CDLL, dtype: torch.dtype, keep: Keep) -> Replacement:
    """Return a function that makes the replacement of a decoder layer.

    The replacement is one C++ call if the library has matrix products for the layer. Otherwise it is eight to ten.
    """
    kernels, step = CpuKernels(library, dtype), SharedStep()
    has_products = Products.available(library, dtype)
    has_onednn = can_pack(dtype)

    def join(layers: Sequence[nn.Linear]) -> nn.Module:
        is_quantized = isinstance(layers[0], QuantizedLinear)
        return PackedLinear(layers) if has_onednn and not is_quantized else concatenate_linears(layers)

    def fuse(parts: LayerParts) -> nn.Module:
        if has_products and NativeDecoderLayer.supports(parts):
            return NativeDecoderLayer(parts, runner.attention, library, step, keep)
        return FusedDecoderLayer(parts, runner.attention, kernels, join)

    return fuse


def _packing(library: ctypes.CDLL | None, dtype: torch.dtype, keep: Keep) -> LinearReplacement:
    """Return a function that packs a linear layer.

    The function returns the packed layer, or None if the layer cannot be packed.
    """
    products = Products(library) if library is not None and Products.available(library, dtype) else None
    has_onednn = can_pack(dtype)

    def pack(linear: nn.Linear) -> nn.Module | None:
        if products is not None and fits_panels(linear):
            return PanelLinear(linear, products, keep)
        return PackedLinear([linear]) if has_onednn and not isinstance(linear, QuantizedLinear) else None

    return pack


def _replace_linears(model: nn.Module, wanted: Collection[nn.Module], pack: LinearReplacement) -> int:
    """Replace the `wanted` linear layers that `pack` can pack; return how many were replaced."""
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) and child in wanted
    ]
    num_packed = 0
    for module, name, child in found:
        if (packed := pack(child)) is not None:
            setattr(module, name, packed)
            num_packed += 1
    return num_packed
