"""Find out at start which optimisations work on a CUDA device: Triton kernels, fused layers, CUDA graphs.

None of these is needed for correct results. If one of them does not work with this device, torch or model, the reason
is logged and torch's operators are used instead.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import nn

from engine.interface import EngineInfo, blocks_for
from engine.native.attention.kernels import AttentionKernels
from engine.native.cuda.graph_sizes import GraphSize
from engine.native.cuda.pinned_ring import PinnedRing
from engine.native.cuda.step_graphs import CaptureFailure, StepGraphs
from engine.native.execution.model_runner import ModelRunner
from engine.native.kv.cache import KVCache
from engine.native.model.fused_layer import FusedDecoderLayer, Join
from engine.native.model.layer_kernels import LayerKernels
from engine.native.model.layer_parts import LayerParts
from engine.native.model.loader import first_line
from engine.native.model.quantized import QuantizedLinear, concatenate_linears
from engine.native.startup import fusion
from engine.native.startup.cuda_trial import find_fault, sampler_fault
from engine.native.startup.probe import LayerSpec
from engine.sampling.sampler import DeviceSampler, sample_ids

_CAPTURE_S = 15.0  # time limit for capturing graphs at start, seconds
_GRAPH_BYTES = 8 << 20  # device memory of a captured graph besides its tensors
_WORKSPACE_BYTES = 64 << 20  # device memory that libraries take for the stream of the captures


def working_kernels(kernels: AttentionKernels | str) -> AttentionKernels | None:
    """Return what `kernels_or_fault` has found; None if that is a reason, which is logged."""
    if not isinstance(kernels, str):
        return kernels
    structlog.get_logger(__name__).warning("no attention kernels: torch's operators are used", reason=kernels)
    return None


def kernels_or_fault(
    specs: Sequence[LayerSpec],
    num_query_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact: bool = False,
    fp8: bool = False,
) -> AttentionKernels | str:
    """Return the Triton attention kernels; `exact` as in `TritonKernels`, `fp8` as in `KVCache`.

    Return the reason instead if they do not run on `device` or do not agree with torch's operators.
    """
    try:
        from engine.native.cuda.kernels import TritonKernels  # only CUDA builds of torch include triton

        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        kernels = TritonKernels(num_processors, exact=exact)
        with torch.cuda.device(device):
            fault = find_fault(kernels, specs, num_query_heads, dtype, device, fp8=fp8)
            torch.cuda.empty_cache()
    except Exception as error:  # compiler, driver or architecture may fail in any way
        return first_line(error)
    return kernels if fault is None else fault


def working_sampler(vocab_size: int, dtype: torch.dtype, device: torch.device) -> DeviceSampler:
    """Return the Triton sampler, or torch's operators if it does not work here; the reason is logged."""
    try:
        from engine.native.cuda.sampler import TritonSampler

        sampler = TritonSampler(PinnedRing(device).upload)
        with torch.cuda.device(device):
            fault = sampler_fault(sampler, vocab_size, dtype, device)
    except Exception as error:  # compiler, driver or architecture may fail in any way
        fault = first_line(error)
    if fault is None:
        return sampler
    structlog.get_logger(__name__).warning("no sampling kernel: torch's operators are used", reason=fault)
    return sample_ids


def optimize_for_cuda(model: nn.Module, runner: ModelRunner, info: EngineInfo, *, exact: bool = False) -> None:
    """Replace common decoder layers by Triton kernels, which need fewer launches; log how many were replaced.

    A layer is replaced only if the kernels compute the same result as the original layer. With `exact`, quantised
    weights are unpacked in each step, so that one kernel multiplies few rows and many.
    """
    log = structlog.get_logger(__name__)
    try:
        from engine.native.cuda.layers import TritonLayerKernels

        device = next(model.parameters()).device
        with torch.cuda.device(device):
            join = concatenate_linears if exact else _join(model, runner.dtype, device)
            num_fused = fuse_with_kernels(model, runner, TritonLayerKernels(), info, join)
    except Exception as error:
        log.warning("not all layers are fused", reason=first_line(error))
    else:
        log.info("model optimized", fused_layers=num_fused, fused_experts=0)  # transformers' modules compute experts


def fuse_with_kernels(
    model: nn.Module, runner: ModelRunner, kernels: LayerKernels, info: EngineInfo, join: Join = concatenate_linears
) -> int:
    """Replace common decoder layers by layers that use `kernels`; return how many were replaced.

    `join` makes the linear layers; quantised ones outside these layers are replaced, too. The engine must have no
    sequences.
    """

    def fuse(parts: LayerParts) -> nn.Module:
        return FusedDecoderLayer(parts, runner.attention, kernels, join)

    num_fused = fusion.fuse_layers(model, runner, fuse, fusion.record_trial_step(model, runner, info).layers)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is QuantizedLinear:
                setattr(parent, name, join([child]))
    return num_fused


def _join(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Join:
    """Return what makes linear layers: with the kernel for quantised weights, if it works on `device`."""
    if not any(isinstance(module, QuantizedLinear) for module in model.modules()):
        return concatenate_linears
    try:
        from engine.native.cuda.quantized_linear import KernelLinear, quantized_fault

        fault = quantized_fault(dtype, device)
    except Exception as error:  # compiler, driver or architecture may fail in any way
        fault = first_line(error)
    if fault is None:
        return lambda layers: KernelLinear.joined([layer for layer in layers if isinstance(layer, QuantizedLinear)])
    structlog.get_logger(__name__).warning("no kernel for quantised weights: each step unpacks them", reason=fault)
    return concatenate_linears


def graph_bytes(sizes: Sequence[GraphSize], max_blocks: int, step_bytes: int) -> int:
    """Return the largest device memory, in bytes, that captured graphs of these `sizes` can take.

    `max_blocks` is the largest number of KV blocks of one sequence. `step_bytes` is the memory of the largest step of
    any kind, including its logits: the graphs share it, and keep logits of their own.
    """
    lines = max(size.decodes + size.num_chunks for size in sizes) * (max_blocks + 8) * 8
    return 2 * lines + 2 * step_bytes + len(sizes) * _GRAPH_BYTES + _WORKSPACE_BYTES


def capture_graphs(
    runner: ModelRunner,
    cache: KVCache,
    info: EngineInfo,
    sizes: Sequence[GraphSize],
    limit_bytes: int,
    device: torch.device,
) -> StepGraphs | None:
    """Capture graphs of steps, within about `_CAPTURE_S` seconds and `limit_bytes` of device memory.

    Return None if no size fits the KV blocks, or if the capture fails; the reason of a failure is logged. The engine
    must have no sequences.
    """
    log = structlog.get_logger(__name__)
    fitting = [size for size in sizes if size.fits(info)]
    if not fitting:
        return None
    max_blocks = blocks_for(info.max_model_len, info.block_size)

    def used_bytes() -> int:
        torch.cuda.empty_cache()  # without what the passes before a capture took
        return torch.cuda.memory_reserved(device) + len(graphs.captured_sizes) * _GRAPH_BYTES

    try:
        graphs = StepGraphs(runner.compute, cache, fitting, max_blocks, PinnedRing(device, depth=2))
        with torch.cuda.device(device):
            most_bytes = used_bytes() + limit_bytes
            graphs.capture(_graph_maker(runner, device), lambda: used_bytes() < most_bytes, _CAPTURE_S)
    except Exception as error:  # modeling code may do anything that a capture does not allow
        log.warning("no CUDA graphs: every step is launched kernel by kernel", reason=first_line(error))
        return None
    finally:
        torch.cuda.empty_cache()  # frees the memory of the passes before each capture
    captured = graphs.captured_sizes
    log.info(
        "CUDA graphs captured",
        decodes=[size.decodes for size in captured if not size.prefill],
        with_prefill=sum(size.prefill > 0 for size in captured),
        left_out=len(sizes) - len(captured),
    )
    return graphs


def _graph_maker(runner: ModelRunner, device: torch.device) -> Callable[[], "CudaGraph"]:
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make() -> CudaGraph:
        if not runner.attention.in_kernels:  # shapes of torch's operators depend on the contexts
            raise CaptureFailure("attention of some layers uses torch's operators")
        return CudaGraph(pool, stream)

    return make


class CudaGraph:
    """A `Graph` that is implemented by torch's `CUDAGraph`.

    Graphs of the same `pool` share memory: a graph's results are overwritten when another graph runs.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream

    def capture(self, function: Callable[[], object]) -> None:
        """Capture `function`, as `Graph.capture` describes; run it once before, so that its workspaces exist."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            function()  # libraries allocate a workspace per stream at first use, which a capture forbids
            torch.cuda.synchronize()
            # "thread_local": other threads may use the device during the capture.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        torch.cuda.synchronize()

    def replay(self) -> None:
        self._graph.replay()
