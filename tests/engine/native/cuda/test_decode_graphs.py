"""Decode steps with graphs give the tokens of eager steps: sizes, padding, static tensors, the scratch block.

The graphs here call their function again instead of replaying a device's recording.
"""

import random
from itertools import pairwise

import pytest
import torch

from engine.interface import NewSequence, Run, StepPlan
from engine.native.batch.packing import StepBatch, pack_step
from engine.native.cuda.decode_graphs import CaptureFailure, DecodeGraphs, bucket_sizes
from engine.sequences.sequence_table import SequenceTable
from tests.engine.conftest import MakeEngine, ModelDirectory
from tests.engine.drive import drive, make_new
from tests.engine.models import VOCAB_SIZE, generate, make_prompts
from tests.engine.native.cuda.rebuilt import RerunGraph, plain_ring, with_graphs

SIZES = (1, 2, 4, 8)


def test_sizes_grow_with_the_batch_and_end_at_the_largest() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert bucket_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert len(bucket_sizes(256)) == 35
    assert bucket_sizes(300)[-4:] == [248, 256, 288, 300]
    assert bucket_sizes(512) == bucket_sizes(1000)
    assert len(bucket_sizes(512)) == 43


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
    assert {size: graph.num_replays for size, graph in graphs.items()} == {8: 4, 4: 2, 2: 1, 1: 1}
    assert engine.num_used_blocks == 0
    few = [make_new(k, prompts[k], "uncached", max_tokens=lengths[k]) for k in ("s0", "s1", "s2")]
    driven = drive(engine, few, chunk=lambda s: 1)  # graphs compute all rows, of which some or none are wanted
    assert all(tuple(d.output) == expected[k] for k, d in driven.items())


def test_padding_rows_write_to_the_scratch_block_only(make_engine: MakeEngine) -> None:
    engine, _, graphs = with_graphs(make_engine("llama", optimize=False), [8])
    cache = engine._runner._cache
    held = engine.info.num_blocks
    assert cache.num_blocks == held + 1
    for pool in cache._pools:
        pool.fill_(7.0)
    drive(engine, [make_new("a", [1, 2, 3], max_tokens=3)])
    assert graphs[8].num_replays == 2
    for pool in cache._pools:
        touched = (pool != 7.0).movedim(3, 0).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert set(touched) == {0, 1, held}  # 3 + 2 tokens in blocks of 4, and scratch
        assert (pool[:, :, :, held, 1:] == 7.0).all()


def test_steps_with_a_prefill_and_larger_steps_do_not_use_graphs(make_engine: MakeEngine) -> None:
    engine, graphs, _ = with_graphs(make_engine("llama", optimize=False), [2])
    table = SequenceTable(engine.info)
    news = (*(make_new(f"s{i}", [1]) for i in range(3)), make_new("long", [1, 2, 3]))

    def packed(*runs: Run, start: tuple[NewSequence, ...] = ()) -> StepBatch:
        return pack_step(table.begin(StepPlan(0, start=start, run=runs)), engine.info.block_size)

    assert graphs.run(packed(Run("s0", 1), Run("long", 3), start=news)) is None
    assert graphs.run(packed(*(Run(f"s{i}", 1) for i in range(3)))) is None
    logits = graphs.run(packed(Run("s0", 1), Run("s1", 1)))
    assert logits is not None
    assert logits.shape == (2, VOCAB_SIZE)


def test_only_columns_that_a_step_uses_are_sent(make_engine: MakeEngine) -> None:
    """A graph has room for the longest block tables, of which most steps use little."""
    engine, graphs, _ = with_graphs(make_engine("llama", optimize=False), [4])
    sizes: list[int] = []
    next_buffer = graphs._ring.next_buffer
    graphs._ring.next_buffer = lambda size: sizes.append(size) or next_buffer(size)  # type: ignore[method-assign,func-returns-value]
    driven = drive(engine, [make_new("a", [1, 2, 3], max_tokens=8)])
    # The first token comes from the prefill. Blocks have 4 tokens, and tables begin at column 4.
    assert len(driven["a"].output) == 8
    assert sizes == [4 * (4 + -(-context // 4)) for context in range(4, 11)]


def test_sizes_are_captured_largest_first_then_powers_of_2(make_engine: MakeEngine) -> None:
    runner = make_engine("llama", optimize=False)._runner
    graphs = DecodeGraphs(runner.compute, runner._cache, bucket_sizes(30), 8, plain_ring())

    seen: list[set[int]] = [set()]

    def note() -> bool:
        seen.append(set(graphs.captured_sizes))
        return True

    graphs.capture(RerunGraph, note, limit_s=60.0)
    seen.append(set(graphs.captured_sizes))
    assert [max(after - before) for before, after in pairwise(seen)] == [30, 16, 8, 4, 2, 1, 24]


def make_graphs(make_engine: MakeEngine) -> DecodeGraphs:
    runner = make_engine("llama", optimize=False)._runner
    return DecodeGraphs(runner.compute, runner._cache, SIZES, 8, plain_ring())


def test_capturing_ends_at_its_time_and_memory_limits(make_engine: MakeEngine) -> None:
    graphs = make_graphs(make_engine)
    graphs.capture(RerunGraph, lambda: True, limit_s=0.0)
    assert graphs.captured_sizes == [8]  # one graph, the largest: it fits every step
    graphs = make_graphs(make_engine)
    room = iter([True, False])
    graphs.capture(RerunGraph, lambda: next(room), limit_s=60.0)
    assert graphs.captured_sizes == [4, 8]


class Forgetful(RerunGraph):
    def replay(self) -> None:
        pass


@pytest.mark.parametrize(("factor", "graph"), [(1.0, Forgetful), (torch.nan, RerunGraph)])
def test_wrong_and_broken_logits_are_not_captured(
    make_engine: MakeEngine, factor: float, graph: type[RerunGraph]
) -> None:
    runner = make_engine("llama", optimize=False)._runner
    graphs = DecodeGraphs(lambda step, rows: runner.compute(step, rows) * factor, runner._cache, SIZES, 8, plain_ring())
    with pytest.raises(CaptureFailure, match="8 rows"):
        graphs.capture(graph, lambda: True, limit_s=60.0)
    assert graphs.captured_sizes == []
