"""Steps with graphs give the tokens of eager steps: sizes, padding, static tensors, the scratch block.

The graphs here call their function again instead of replaying a device's recording.
"""

import random
from itertools import pairwise

import pytest
import torch

from engine.interface import NewSequence, PreemptionMode, Run, StepPlan
from engine.native.attention.kernels import AttentionKernels
from engine.native.batch.packing import StepBatch, pack_step
from engine.native.cpu.kernels import CpuKernels
from engine.native.cuda.graph_sizes import GraphSize, graph_sizes
from engine.native.cuda.step_graphs import CaptureFailure, StepGraphs
from engine.native.execution.torch_engine import TorchEngine
from engine.sequences.sequence_table import SequenceTable
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.drive import drive, make_new, random_chunks, random_preemption
from tests.engine.models import VOCAB_SIZE, generate, make_prompts
from tests.engine.native.cpu.compiled import compiled_library
from tests.engine.native.cuda.rebuilt import RerunGraph, plain_ring, with_graphs

SIZES = tuple(map(GraphSize, (8, 4, 2, 1)))


@pytest.fixture
def kernels() -> AttentionKernels:
    """Kernels that read extents and block tables from tensors, as a graph's must; of heads of 16 numbers, not of 8."""
    return CpuKernels(compiled_library(), torch.float32)


def test_sizes_of_steps_without_prefill_grow_with_the_batch() -> None:
    def decodes(max_decodes: int) -> list[int]:
        return sorted(size.decodes for size in graph_sizes(max_decodes, 2048) if not size.prefill)

    assert decodes(1) == [1]
    assert decodes(3) == [1, 2, 3]
    assert decodes(8) == [1, 2, 4, 8]
    assert decodes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert len(decodes(256)) == 35
    assert decodes(300)[-4:] == [248, 256, 288, 300]
    assert decodes(512) == decodes(1000)
    assert len(decodes(512)) == 43


def test_a_step_with_a_prefill_has_a_graph_if_its_prefill_is_no_larger_than_a_step() -> None:
    mixed = [size for size in graph_sizes(256, 2048) if size.prefill]
    assert len(set(mixed)) == 4 * 11
    assert {size.decodes for size in mixed} == {16, 64, 128, 256}
    assert max(mixed, key=sum) == (256, 2048)
    assert [size for size in graph_sizes(20, 100) if size.prefill] == [(20, 64), (16, 64)]
    assert not [size for size in graph_sizes(8, 63) if size.prefill]
    assert GraphSize(8, 64).num_chunks == 32
    assert GraphSize(8, 5).num_chunks == 2


def test_the_largest_is_captured_first_then_powers_of_2_then_those_with_a_prefill() -> None:
    assert graph_sizes(30, 100) == [
        *((size, 0) for size in (30, 16, 8, 4, 2, 1)),
        *((size, 64) for size in (30, 16)),
        (24, 0),
    ]


def test_the_trial_has_no_positions_beyond_the_context(kernels: AttentionKernels, make_engine: MakeEngine) -> None:
    """Learned positions end there, and a device that reads past their end is lost to the process."""
    engine = make_engine("qwen3", optimize=False)
    sizes = [size for size in graph_sizes(16, 2048) if size.fits(engine.info)]
    assert (16, 128) in sizes
    assert (16, 256) not in sizes
    _, graphs, _ = with_graphs(engine, sizes, kernels)
    assert graphs.captured_sizes == sorted(sizes)
    assert int(graphs._prefill.max(dim=0).values[1]) < engine.info.max_model_len


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gpt2"])
def test_tokens_are_those_of_generate(name: str, make_engine: MakeEngine, model_directory: ModelDirectory) -> None:
    """The batch shrinks from eleven sequences, more than the largest graph has rows, to one."""
    engine, _, graphs = with_graphs(make_engine(name, optimize=False), SIZES)
    prompts = make_prompts(random.Random(3), 11)
    lengths = {seq_id: 2 + i for i, seq_id in enumerate(prompts)}
    driven = drive(engine, [make_new(k, p, max_tokens=lengths[k]) for k, p in prompts.items()])
    expected = {k: generate(model_directory(name)[1], p, lengths[k]) for k, p in prompts.items()}
    assert {k: tuple(d.output) for k, d in driven.items()} == expected
    # After the prefill and steps of 11, 10 and 9 rows: 8, 7 … 1.
    assert {size.decodes: graph.num_replays for size, graph in graphs.items()} == {8: 4, 4: 2, 2: 1, 1: 1}
    assert engine.num_used_blocks == 0
    few = [make_new(k, prompts[k], "uncached", max_tokens=lengths[k]) for k in ("s0", "s1", "s2")]
    driven = drive(engine, few, chunk=lambda s: 1)  # graphs compute all rows, of which some or none are wanted
    assert all(tuple(d.output) == expected[k] for k, d in driven.items())


def test_tokens_beside_prefills_are_those_of_generate(
    kernels: AttentionKernels, make_engine: MakeEngine, model_directory: ModelDirectory
) -> None:
    """Chunks of all sizes beside decodes: few and many, with and without preemption, logits of some or no rows."""
    sizes = [*SIZES, GraphSize(8, 24), GraphSize(2, 24), GraphSize(8, 6), GraphSize(2, 6)]
    engine, _, graphs = with_graphs(make_engine("qwen3", optimize=False), sizes, kernels)
    prompts = make_prompts(random.Random(3), 11)
    expected = {k: generate(model_directory("qwen3")[1], p, 9) for k, p in prompts.items()}
    for seed in range(4):
        rng = random.Random(seed)
        preempt = random_preemption(rng, 0.1, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
        news = [make_new(k, p, f"salt {seed}", max_tokens=9) for k, p in prompts.items()]
        driven = drive(engine, news, random_chunks(rng, 7), preempt, arrivals_a_step=1 + seed)
        assert {k: tuple(d.output) for k, d in driven.items()} == expected
    assert all(graph.num_replays > 0 for graph in graphs.values())
    assert engine.num_used_blocks == 0


def test_padding_writes_to_the_scratch_block_only(kernels: AttentionKernels, make_engine: MakeEngine) -> None:
    sizes = [GraphSize(8), GraphSize(8, 24)]
    engine, _, graphs = with_graphs(make_engine("qwen3", optimize=False), sizes, kernels)
    cache = engine._runner._cache
    held = engine.info.num_blocks
    assert cache.num_blocks == held + 1
    for pool in cache._pools:
        pool.fill_(7.0)
    drive(engine, [make_new("a", [1, 2, 3], max_tokens=3)])
    assert [graph.num_replays for graph in graphs.values()] == [2, 1]
    for pool in cache._pools:
        touched = (pool != 7.0).movedim(3, 0).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert set(touched) == {0, 1, held}  # 3 + 2 tokens in blocks of 4, and scratch
        assert (pool[:, :, :, held, 1:] == 7.0).all()


def test_a_step_runs_as_the_smallest_graph_that_fits(kernels: AttentionKernels, make_engine: MakeEngine) -> None:
    engine = make_engine("qwen3", optimize=False)
    sizes = [GraphSize(4), GraphSize(2), GraphSize(2, 8), GraphSize(4, 4), GraphSize(4, 8), GraphSize(2, 80)]
    engine, graphs, _ = with_graphs(engine, sizes, kernels)
    table = SequenceTable(engine.info)

    def fitting(*counts: int) -> GraphSize | None:
        return graphs.fitting_size(packed(engine, table, counts))

    assert fitting(1) == (2, 0)
    assert fitting(1, 1, 1) == (4, 0)
    assert fitting(1, 1, 1, 1, 1) is None
    assert fitting(3) == (4, 4)
    assert fitting(1, 5) == (2, 8)
    assert fitting(1, 1, 1, 5) == (4, 8)
    assert fitting(1, 99) is None
    assert fitting(*[2] * 32) == (2, 80)
    assert fitting(*[2] * 33) is None  # a graph has room for 32 chunks


def packed(engine: TorchEngine, table: SequenceTable, counts: tuple[int, ...]) -> StepBatch:
    """Return a step that computes so many tokens of each of some new sequences."""
    names = [f"{'-'.join(map(str, counts))}/{i}" for i in range(len(counts))]
    start: list[NewSequence] = [make_new(name, [1] * count) for name, count in zip(names, counts, strict=True)]
    runs = tuple(Run(name, count) for name, count in zip(names, counts, strict=True))
    return pack_step(table.begin(StepPlan(0, start=tuple(start), run=runs)), engine.info.block_size)


def test_logits_are_those_of_the_sampled_rows(make_engine: MakeEngine) -> None:
    engine, graphs, _ = with_graphs(make_engine("llama", optimize=False), [GraphSize(2)])
    batch = packed(engine, SequenceTable(engine.info), (1, 1))
    logits = graphs.run(batch, GraphSize(2))
    assert logits is not None
    assert logits.shape == (2, VOCAB_SIZE)


def test_only_columns_that_a_step_uses_are_sent(make_engine: MakeEngine) -> None:
    """A graph has room for the longest block tables, of which most steps use little."""
    engine, graphs, _ = with_graphs(make_engine("llama", optimize=False), [GraphSize(4)])
    sizes: list[int] = []
    next_buffer = graphs._ring.next_buffer
    graphs._ring.next_buffer = lambda size: sizes.append(size) or next_buffer(size)  # type: ignore[method-assign,func-returns-value]
    driven = drive(engine, [make_new("a", [1, 2, 3], max_tokens=8)])
    # The first token comes from the prefill. Blocks have 4 tokens, tables begin at column 4, and 4 rows have logits.
    assert len(driven["a"].output) == 8
    assert sizes == [4 * (4 + -(-context // 4)) + 4 for context in range(4, 11)]


def make_graphs(engine: TorchEngine, sizes: tuple[GraphSize, ...] = SIZES) -> StepGraphs:
    runner = engine._runner
    return StepGraphs(runner.compute, runner._cache, sizes, 8, plain_ring())


def test_sizes_are_captured_in_their_order(make_engine: MakeEngine) -> None:
    graphs = make_graphs(make_engine("llama", optimize=False))
    seen: list[set[GraphSize]] = [set()]

    def note() -> bool:
        seen.append(set(graphs.captured_sizes))
        return True

    graphs.capture(RerunGraph, note, limit_s=60.0)
    seen.append(set(graphs.captured_sizes))
    assert [max(after - before) for before, after in pairwise(seen)] == list(SIZES)


def test_capturing_ends_at_its_time_and_memory_limits(make_engine: MakeEngine) -> None:
    graphs = make_graphs(make_engine("llama", optimize=False))
    graphs.capture(RerunGraph, lambda: True, limit_s=0.0)
    assert graphs.captured_sizes == [(8, 0)]  # one graph, the largest: it fits every step
    graphs = make_graphs(make_engine("llama", optimize=False))
    room = iter([True, False])
    graphs.capture(RerunGraph, lambda: next(room), limit_s=60.0)
    assert graphs.captured_sizes == [(4, 0), (8, 0)]


class Forgetful(RerunGraph):
    def replay(self) -> None:
        pass


@pytest.mark.parametrize(("factor", "graph"), [(1.0, Forgetful), (torch.nan, RerunGraph)])
def test_wrong_and_broken_logits_are_not_captured(
    make_engine: MakeEngine, factor: float, graph: type[RerunGraph]
) -> None:
    runner = make_engine("llama", optimize=False)._runner
    graphs = StepGraphs(lambda step, rows: runner.compute(step, rows) * factor, runner._cache, SIZES, 8, plain_ring())
    with pytest.raises(CaptureFailure, match="decodes=8"):
        graphs.capture(graph, lambda: True, limit_s=60.0)
    assert graphs.captured_sizes == []
