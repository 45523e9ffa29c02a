"""Swapping: copies to host memory and back, and the blocks that it frees."""

import pytest
import torch

from engine.config import EngineStartError
from engine.interface import PlanError, Preempt, PreemptionMode, Run, StepPlan
from engine.native.kv.cache import KVCache, LayerShape
from engine.native.kv.swap import SwapSpace
from engine.sequences.sequence_table import BlockCopies
from tests.engine.conftest import MakeEngine
from tests.engine.drive import make_new
from tests.engine.models import BLOCK_BYTES

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
CPU = torch.device("cpu")


def make_cache(num_blocks: int = 200) -> KVCache:
    """Return a cache of three layers in two shapes, filled with random numbers."""
    cache = KVCache([LayerShape(2, 8), LayerShape(1, 4), LayerShape(2, 8)], num_blocks, 4, torch.float32, CPU)
    blocks = torch.arange(num_blocks)
    contents = [torch.rand_like(c) for c in cache.read_blocks(blocks)]
    cache.write_blocks(blocks, contents)
    return cache


def block(cache: KVCache, number: int) -> list[torch.Tensor]:
    return cache.read_blocks(torch.tensor([number]))


def test_blocks_come_back_unchanged_to_any_place() -> None:
    cache = make_cache()
    space = SwapSpace(cache, 150, CPU)
    copies = list(zip(range(10, 140), [*range(40, 100), *range(39, -1, -1), *range(120, 150)], strict=True))
    before = {device: block(cache, device) for device, _ in copies}
    others = {number: block(cache, number) for number in range(200) if number not in before}
    space.copy(BlockCopies(out=copies))
    for device, _ in copies:
        cache.clear(torch.tensor([device]))
    back = [(host, 149 - device) for device, host in copies]
    space.copy(BlockCopies(back=back))
    for device, _ in copies:
        assert all(map(torch.equal, before[device], block(cache, 149 - device)))
    assert all(map(torch.equal, others[199], block(cache, 199)))
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


def test_a_resumed_sequence_shares_cached_blocks_again(make_engine: MakeEngine) -> None:
    engine = make_engine(swap_bytes=8 * BLOCK_BYTES, kv_cache_bytes=12 * BLOCK_BYTES)
    news = [make_new(name, range(1, 12), max_tokens=6) for name in "ab"]
    engine.step(StepPlan(0, start=(news[0],), run=(Run("a", 11),)))
    engine.step(StepPlan(1, start=(news[1],), run=(Run("b", 11),)))
    assert engine.num_used_blocks == 4, "two shared blocks, and the last block of each"
    engine.step(StepPlan(2, preempt=(Preempt("b", SWAP),)))
    assert (engine.num_used_blocks, engine.num_used_swap_blocks) == (3, 3)
    engine.step(StepPlan(3, resume=("b",), run=(Run("b", 1),)))
    assert (engine.num_used_blocks, engine.num_used_swap_blocks) == (4, 0)


def test_a_resume_needs_free_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(swap_bytes=8 * BLOCK_BYTES, kv_cache_bytes=4 * BLOCK_BYTES, prefix_cache=False)
    engine.step(StepPlan(0, start=(make_new("a", range(1, 10)),), run=(Run("a", 9),)))
    b = make_new("b", range(20, 26))
    engine.step(StepPlan(1, preempt=(Preempt("a", SWAP),), start=(b,), run=(Run("b", 6),)))
    with pytest.raises(PlanError, match="needs 3 KV blocks and 2 are free"):
        engine.step(StepPlan(2, resume=("a",)))
    engine.step(StepPlan(3, abort=("b",), resume=("a",), run=(Run("a", 1),)))
    engine.step(StepPlan(4, preempt=(Preempt("a", SWAP),)))
    engine.step(StepPlan(5, abort=("a",)))
    assert (engine.num_used_blocks, engine.num_used_swap_blocks) == (0, 0)


def test_without_host_memory_there_is_no_swapping(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.info.num_swap_blocks == 0
    assert "swap" not in engine.info.preemption_modes
    with pytest.raises(EngineStartError, match="swap_bytes"):
        make_engine(swap_bytes=1 << 60)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_host_memory_is_pinned_and_blocks_come_back() -> None:
    device = torch.device("cuda")
    cache = KVCache([LayerShape(2, 64)] * 2, 300, 16, torch.bfloat16, device)
    ids = torch.arange(300, device=device)
    cache.write_blocks(ids, [torch.rand_like(c) for c in cache.read_blocks(ids)])
    space = SwapSpace(cache, 200, device)
    assert all(host.is_pinned() for host in space._host)
    before = [c.clone() for c in cache.read_blocks(ids)]
    space.copy(BlockCopies(out=[(i, 199 - i) for i in range(200)]))
    cache.clear(ids[:200])
    space.copy(BlockCopies(back=[(199 - i, i) for i in range(200)]))
    assert all(map(torch.equal, before, cache.read_blocks(ids)))
