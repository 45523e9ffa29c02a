"""Kernels and graphs that do not work on a device are not used, and the log has the reason."""

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from engine.native.attention.kernels import AttentionKernels, HeadShape, PagedChunks, PagedRows, Scoring
from engine.native.cuda.graph_sizes import GraphSize
from engine.native.kv.cache import LayerShape
from engine.native.startup.cuda_bring_up import capture_graphs, graph_bytes, kernels_or_fault, working_kernels
from engine.native.startup.cuda_trial import find_fault
from engine.native.startup.probe import LayerSpec
from tests.engine.conftest import MakeEngine

CPU = torch.device("cpu")
SPECS = [LayerSpec(LayerShape(2, 16), None), LayerSpec(LayerShape(2, 16), 40)]


class WrongKernels(AttentionKernels):
    """Attention kernels that always return zeros."""

    def can_attend(self, shape: HeadShape) -> bool:
        return True

    def paged_decode(self, query: Tensor, num_kv_heads: int, paged: PagedRows, scoring: Scoring) -> Tensor:
        return torch.zeros_like(query.transpose(0, 1))

    def paged_prefill(self, query: Tensor, num_kv_heads: int, chunks: PagedChunks, scoring: Scoring) -> Tensor | None:
        return None


class NoKernels(WrongKernels):
    """Attention kernels that support no shape."""

    def can_attend(self, shape: HeadShape) -> bool:
        return False


class BrokenKernels(WrongKernels):
    """Attention kernels that return NaN."""

    def paged_decode(self, query: Tensor, num_kv_heads: int, paged: PagedRows, scoring: Scoring) -> Tensor:
        return super().paged_decode(query, num_kv_heads, paged, scoring) * torch.nan


def test_wrong_results_are_found() -> None:
    assert "off for KV heads of 16" in (find_fault(WrongKernels(), SPECS, 4, torch.float32, CPU) or "")
    assert "nan off" in (find_fault(BrokenKernels(), SPECS, 4, torch.float32, CPU) or "")
    assert find_fault(NoKernels(), SPECS, 4, torch.float32, CPU) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="they work on a GPU")
def test_without_a_working_device_there_are_no_kernels() -> None:
    with capture_logs() as logs:
        assert working_kernels(kernels_or_fault(SPECS, 4, torch.float32, torch.device("cuda", 0))) is None
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert entry["reason"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they work on a GPU")
def test_without_a_working_device_there_are_no_graphs(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", optimize=False)
    runner = engine._runner
    with capture_logs() as logs:
        assert (
            capture_graphs(runner, runner._cache, engine.info, [GraphSize(1)], 1 << 30, torch.device("cuda", 0)) is None
        )
    (entry,) = logs
    assert entry["event"].startswith("no CUDA graphs")
    assert entry["reason"]


def test_graph_memory_covers_their_lines_and_a_step() -> None:
    assert graph_bytes([GraphSize(1), GraphSize(64), GraphSize(2)], 100, step_bytes=1000) > 64 * 105 * 8 + 1000
    sizes = [GraphSize(2), GraphSize(1)]
    assert graph_bytes(sizes, 100, 1000) < graph_bytes([*sizes, GraphSize(1, 64)], 100, 1000)
