"""A step that does not fit in memory gives the same tokens; a sequence that cannot fit at all fails alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import NewSequence, PreemptionMode
from engine.native.batch.packing import StepBatch
from engine.native.execution.model_runner import ModelRunner
from engine.native.execution.oom_split import cut, is_out_of_memory
from engine.sequences.chunk import Chunk
from engine.sequences.sequence import Sequence
from tests.engine.conftest import MakeEngine
from tests.engine.drive import Driven, drive, make_new, random_chunks, random_preemption
from tests.engine.models import CONFIGS, POISON, save_model

CPU_ERROR = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: …")
CUDA_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class ScarceMemory:
    """Lets forward passes fail that have more than `most_rows` tokens or positions above `last_position`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception = CUDA_ERROR) -> None:
        self.most_rows = 10_000
        self.last_position = 10_000
        self.num_refused = 0
        run = ModelRunner.run

        def refuse(runner: ModelRunner, batch: StepBatch, **more: Any) -> Tensor | None:
            if batch.num_rows > self.most_rows or batch.positions.max() > self.last_position:
                self.num_refused += 1
                raise error
            return run(runner, batch, **more)

        monkeypatch.setattr(ModelRunner, "run", refuse)


def make_news(count: int = 5) -> list[NewSequence]:
    rng = random.Random(4)
    prompts = [[rng.randrange(1, POISON) for _ in range(rng.randint(2, 40))] for _ in range(count)]
    return [
        make_new(f"s{i}", prompt, temperature=i % 2, seed=i, repetition_penalty=1.2, logprobs=2, prompt_logprobs=1)
        for i, prompt in enumerate(prompts)
    ]


def outputs(driven: dict[str, Driven]) -> dict[str, list[int]]:
    assert [d.failure for d in driven.values() if d.failure] == []
    return {seq_id: d.output for seq_id, d in driven.items()}


@pytest.mark.parametrize(
    ("most_rows", "error"), [(1, CUDA_ERROR), (3, CPU_ERROR), (16, MemoryError())], ids=["cuda", "cpu", "host"]
)
def test_tokens_are_the_same_with_little_memory(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, most_rows: int, error: Exception
) -> None:
    engine, preempting = make_engine("mistral"), make_engine("mistral")
    expected = outputs(drive(make_engine("mistral"), make_news()))
    scarce = ScarceMemory(monkeypatch, error)
    scarce.most_rows = most_rows
    assert outputs(drive(engine, make_news())) == expected
    assert scarce.num_refused > 0
    assert engine.num_used_blocks == 0
    preempt = random_preemption(random.Random(1), 0.2, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
    assert outputs(drive(preempting, make_news(), random_chunks(random.Random(1), 9), preempt)) == expected


def test_a_sequence_that_never_fits_fails_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    news = [
        make_new("long", range(1, 40), max_tokens=4),
        *(make_new(f"s{i}", [5, 6 + i], max_tokens=4) for i in range(3)),
    ]
    expected = {new.seq_id: drive(make_engine(), [new])[new.seq_id].output for new in news[1:]}
    engine = make_engine()
    scarce = ScarceMemory(monkeypatch)
    scarce.last_position = 20
    driven = drive(engine, news)
    assert "not enough memory" in str(driven.pop("long").failure)
    assert outputs(driven) == expected
    assert engine.num_used_blocks == 0
    scarce.most_rows = 0
    assert all(d.failure for d in drive(engine, news).values())
    scarce.most_rows, scarce.last_position = 10_000, 10_000
    assert outputs(drive(engine, news[1:])) == expected


def test_any_other_error_is_raised(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    scarce = ScarceMemory(monkeypatch, RuntimeError("CUDA error: device-side assert triggered"))
    scarce.most_rows = 3
    with pytest.raises(RuntimeError, match="device-side assert"):
        drive(engine, make_news())
    assert scarce.num_refused == 1


def test_pieces_read_nothing_of_a_blocks_former_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks may hold NaNs after the end of a piece, and a mask does not remove a NaN."""
    save_model(tmp_path, CONFIGS["llama"](), poisoned_token=POISON)
    config = EngineConfig(str(tmp_path), dtype="float32", device="cpu", block_size=4, max_model_len=128, max_num_seqs=4)
    news = make_news(3)
    expected = outputs(drive(build_torch_engine(config), news))
    scarce = ScarceMemory(monkeypatch)
    for most_rows in (1, 3, 8):
        scarce.most_rows = 10_000
        engine = build_torch_engine(config)
        drive(engine, [make_new(f"p{i}", [POISON] * 100) for i in range(4)])
        scarce.most_rows = most_rows
        assert outputs(drive(engine, news)) == expected


@given(start=st.integers(0, 30), num_tokens=st.integers(2, 30), block_size=st.integers(1, 8))
def test_two_halves_cover_the_chunk_and_clear_each_new_block_once(start: int, num_tokens: int, block_size: int) -> None:
    end = start + num_tokens
    sequence = Sequence(make_new("a", range(end)), 1000, ())
    sequence.block_table.extend(range(100, 100 + -(-end // block_size)))
    num_blocks_before = -(-start // block_size)
    ends_in_a_new_block = end % block_size and end // block_size >= num_blocks_before
    chunk = Chunk(sequence, start, num_tokens, sequence.block_table[-1] if ends_in_a_new_block else None)
    earlier, later = cut(chunk, block_size)
    assert (earlier.start, earlier.end, later.end) == (start, later.start, end)
    assert min(earlier.num_tokens, later.num_tokens) == num_tokens // 2
    # A piece clears no block that holds keys and values already.
    for piece in (earlier, later):
        if piece.unfilled_block is not None:
            assert (piece.unfilled_block - 100) * block_size >= piece.start
    cleared = {piece.unfilled_block for piece in (earlier, later)} - {None}
    half_written = {100 + piece.end // block_size for piece in (earlier, later) if piece.end % block_size}
    assert cleared == {block for block in half_written if block - 100 >= num_blocks_before}


def test_errors_that_torch_raises_when_memory_runs_out() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 55)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(CUDA_ERROR)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
