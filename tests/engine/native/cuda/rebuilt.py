"""Engines of `make_engine` with another runner, and graphs that need no CUDA."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.native.attention.kernels import AttentionKernels
from engine.native.cuda.graph_sizes import GraphSize
from engine.native.cuda.pinned_ring import PinnedRing
from engine.native.cuda.step_graphs import StepGraphs
from engine.native.execution.model_runner import ModelRunner
from engine.native.execution.torch_engine import TorchEngine
from engine.native.model.layer_kernels import LayerKernels
from engine.native.startup.cuda_bring_up import fuse_with_kernels

CPU = torch.device("cpu")


class NoEvent:
    """An event for copies that are complete when the call returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class RerunGraph:
    """A graph without CUDA: replaying calls the captured function again, on the same tensors."""

    def __init__(self) -> None:
        self.num_replays = 0
        self._function: Callable[[], object] | None = None

    def capture(self, function: Callable[[], object]) -> None:
        self._function = function
        function()

    def replay(self) -> None:
        assert self._function is not None
        self.num_replays += 1
        self._function()


def plain_ring(depth: int = 2) -> PinnedRing:
    return PinnedRing(CPU, depth, pin=False, make_event=NoEvent)


def with_kernels(engine: TorchEngine, kernels: AttentionKernels | None) -> TorchEngine:
    """Return another engine with the model (not optimized) and the memory of `engine`, which must not be used again."""
    return TorchEngine(engine.info, _runner(engine, kernels))


def with_graphs(
    engine: TorchEngine,
    sizes: Sequence[GraphSize],
    kernels: AttentionKernels | None = None,
    *,
    layers: LayerKernels | None = None,
    exact: bool = False,
) -> tuple[TorchEngine, StepGraphs, dict[GraphSize, RerunGraph]]:
    """Return the same with graphs of these sizes, which own the last KV block, and with fused `layers`."""
    info = replace(engine.info, num_blocks=engine.info.num_blocks - 1)
    runner = _runner(engine, kernels)
    if layers is not None:
        assert fuse_with_kernels(runner._model, runner, layers, info)
    runner.is_exact = exact
    made: list[RerunGraph] = []
    max_blocks = -(-info.max_model_len // info.block_size)
    graphs = StepGraphs(runner.compute, engine._runner._cache, sizes, max_blocks, plain_ring())

    def make() -> RerunGraph:
        made.append(RerunGraph())
        return made[-1]

    graphs.capture(make, lambda: True, limit_s=60.0)
    runner.use_graphs(graphs)
    for graph in made:
        graph.num_replays = 0
    return TorchEngine(info, runner), graphs, dict(zip(sizes, made, strict=True))


def _runner(engine: TorchEngine, kernels: AttentionKernels | None) -> ModelRunner:
    old = engine._runner
    return ModelRunner(old._model, old._cache, old.attention._windows, CPU, kernels)
