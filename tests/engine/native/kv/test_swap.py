"""Swapping: copies to host memory and back, and the blocks that it frees."""

import pytest
import torch

from engine.config import EngineStartError
from engine.native.kv.cache import KVCache, LayerShape
from engine.native.kv.swap import SwapSpace
from engine.sequences.sequence_table import BlockCopies
from tests.engine.conftest import MakeEngine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def make_cache(num_blocks: int = 200, device: torch.device = CPU, *, fp8: bool = False) -> KVCache:
    """Return a cache of three layers in two shapes, filled with random numbers."""
    shapes = [LayerShape(2, 8), LayerShape(1, 4), LayerShape(2, 8)]
    cache = KVCache(shapes, num_blocks, 4, torch.float32, device, fp8=fp8)
    blocks = torch.arange(num_blocks, device=device)
    cache.write_blocks(blocks, [(200 * torch.rand(c.shape)).to(c) for c in cache.read_blocks(blocks)])
    return cache


def block(cache: KVCache, number: int) -> list[torch.Tensor]:
    return cache.read_blocks(torch.tensor([number], device=cache.layers[0].slots.device))


@pytest.mark.parametrize(
    "device",
    [CPU, pytest.param(CUDA, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
    ids=str,
)
@pytest.mark.parametrize("fp8", [False, True], ids=("plain", "fp8"))
def test_blocks_come_back_unchanged_to_any_place(device: torch.device, fp8: bool) -> None:
    cache = make_cache(device=device, fp8=fp8)
    space = SwapSpace(cache, 150, device)
    assert all(host.is_pinned() == (device == CUDA) for host in space._host)
    copies = list(zip(range(10, 140), [*range(40, 100), *range(39, -1, -1), *range(120, 150)], strict=True))
    before = {number: block(cache, number) for number in range(200)}
    space.copy(BlockCopies(out=copies))
    cache.clear(torch.arange(10, 140, device=device))
    space.copy(BlockCopies(back=[(host, 149 - number) for number, host in copies]))
    for number, _ in copies:
        assert all(map(torch.equal, before[number], block(cache, 149 - number)))
    assert all(map(torch.equal, before[199], block(cache, 199)))
    assert space.measure() > 0


def test_blocks_are_copied_out_before_others_are_copied_back() -> None:
    """In one step, a sequence may be swapped in to a block that another one is swapped out of."""
    cache = make_cache(4)
    space = SwapSpace(cache, 2, CPU)
    first, second = block(cache, 0), block(cache, 1)
    space.copy(BlockCopies(out=[(0, 0)]))
    space.copy(BlockCopies(out=[(1, 1)], back=[(0, 1)]))
    assert all(map(torch.equal, block(cache, 1), first))
    space.copy(BlockCopies(back=[(1, 0)]))
    assert all(map(torch.equal, block(cache, 0), second))


def test_without_host_memory_there_is_no_swapping(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.info.num_swap_blocks == 0
    assert "swap" not in engine.info.preemption_modes
    with pytest.raises(EngineStartError, match="swap_bytes"):
        make_engine(swap_bytes=1 << 60)
