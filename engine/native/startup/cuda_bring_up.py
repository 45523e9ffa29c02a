"""What the engine uses of a CUDA device, found out at its start and logged: kernels, captured graphs, or neither.

Nothing here is needed for right answers. Whatever does not work on this device, with this torch or this model is left
out with its reason, and torch's operators do it.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import nn

from engine.interface import EngineInfo, blocks_for
from engine.native.attention.kernels import AttentionKernels
from engine.native.cuda.decode_graphs import CaptureFailure, DecodeGraphs, bucket_sizes
from engine.native.cuda.pinned_ring import PinnedRing
from engine.native.device import free_bytes
from engine.native.execution.model_runner import ModelRunner
from engine.native.kv.cache import KVCache
from engine.native.model.fused_layer import FusedDecoderLayer
from engine.native.model.layer_kernels import LayerKernels
from engine.native.model.loader import first_line
from engine.native.model.probe import LayerSpec
from engine.native.startup import fusion
from engine.native.startup.cuda_trial import find_fault

_CAPTURE_S = 15.0
_GRAPH_BYTES = 8 << 20  # what a captured graph takes on the device besides tensors


def working_kernels(
    specs: Sequence[LayerSpec], num_query_heads: int, dtype: torch.dtype, device: torch.device
) -> AttentionKernels | None:
    """Triton's kernels where they run and are right."""
    try:
        from engine.native.cuda.kernels import TritonKernels  # triton comes with the CUDA builds of torch only

        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        kernels = TritonKernels(num_processors)
        with torch.cuda.device(device):
            fault = find_fault(kernels, specs, num_query_heads, dtype, device)
            torch.cuda.empty_cache()
    except Exception as error:  # a compiler, a driver, an architecture: anything
        fault = first_line(error)
    if fault is None:
        return kernels
    structlog.get_logger(__name__).warning("no attention kernels: torch's operators attend", reason=fault)
    return None


def fuse_layers(model: nn.Module, runner: ModelRunner, info: EngineInfo) -> None:
    """Common decoder layers as few launches, one by one where it changes nothing but speed."""
    log = structlog.get_logger(__name__)
    try:
        from engine.native.cuda.layers import TritonLayerKernels

        with torch.cuda.device(next(model.parameters()).device):
            num_fused = fuse_with_kernels(model, runner, TritonLayerKernels(), info)
    except Exception as error:
        log.warning("not all layers are fused", reason=first_line(error))
    else:
        log.info("model optimized", fused_layers=num_fused)


def fuse_with_kernels(model: nn.Module, runner: ModelRunner, kernels: LayerKernels, info: EngineInfo) -> int:
    """The number of layers fused. The engine must be without sequences."""

    def fuse(layer: nn.Module) -> nn.Module:
        return FusedDecoderLayer(layer, runner.attention, kernels)

    return fusion.fuse_layers(model, runner, fuse, fusion.record_trial_step(model, runner, info).layers)


def graph_bytes(sizes: Sequence[int], max_blocks: int, step_bytes: int) -> int:
    """Of device memory that captured graphs of these sizes take at most; `step_bytes`: what the largest step of any
    kind takes, which has their logits, too."""
    lines = max(sizes) * (max_blocks + 8) * 8
    return lines + 2 * step_bytes + len(sizes) * _GRAPH_BYTES


def graph_sizes(max_num_seqs: int, max_step_tokens: int) -> list[int]:
    return bucket_sizes(min(max_num_seqs, max_step_tokens))


def capture_graphs(
    runner: ModelRunner, cache: KVCache, info: EngineInfo, sizes: Sequence[int], limit_bytes: int, device: torch.device
) -> DecodeGraphs | None:
    """Graphs of decode steps, where the model can be captured; in about 15 seconds and `limit_bytes` of memory. The
    engine must be without sequences."""
    log = structlog.get_logger(__name__)
    fitting = [size for size in sizes if size <= info.num_blocks]  # a row has a block
    if not fitting:
        return None
    max_blocks = blocks_for(info.max_model_len, info.block_size)
    try:
        least_free = free_bytes(device) - limit_bytes
        graphs = DecodeGraphs(runner.compute, cache, fitting, max_blocks, PinnedRing(device, depth=2))
        with torch.cuda.device(device):
            graphs.capture(_graph_maker(runner, device), lambda: free_bytes(device) > least_free, _CAPTURE_S)
    except Exception as error:  # models do what a capture does not allow in as many ways as there are models
        log.warning("no CUDA graphs: every step is launched", reason=first_line(error))
        return None
    finally:
        torch.cuda.empty_cache()  # of what was computed before each capture
    captured = graphs.captured_sizes
    log.info("CUDA graphs captured", batch_sizes=captured, left_out=len(sizes) - len(captured))
    return graphs


def _graph_maker(runner: ModelRunner, device: torch.device) -> Callable[[], "CudaGraph"]:
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make() -> CudaGraph:
        if not runner.attention.decodes_in_kernels:  # its operators' shapes follow the contexts
            raise CaptureFailure("attention of some layers runs in torch's operators")
        return CudaGraph(pool, stream)

    return make


class CudaGraph:
    """Graphs of one `pool` share memory: what one of them leaves there is gone when another runs."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream

    def capture(self, function: Callable[[], object]) -> None:
        """As `Graph` has it."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            function()  # libraries keep workspaces for each stream, which are not to be made in the capture
            torch.cuda.synchronize()
            # Only what this thread does counts: others may use the device meanwhile.
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
