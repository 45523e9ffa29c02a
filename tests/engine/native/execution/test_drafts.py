"""A draft is computed as if each of its tokens were decoded alone, bit by bit with own kernels.

That no draft changes a sequence is a law of all engines (tests/engine/contract).
"""

import random
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import Run, StepPlan
from engine.native.execution.oom_split import without_draft
from engine.native.execution.torch_engine import TorchEngine
from engine.sequences.chunk import Chunk
from engine.sequences.sequence import Sequence
from tests.engine.conftest import MakeEngine
from tests.engine.contract.reported import Reported
from tests.engine.drive import Driven, drive, make_new, random_drafts
from tests.engine.models import family, save_model
from tests.engine.native.cpu.compiled import PRODUCTS, library_with
from tests.engine.native.cpu.test_native_layer import CONFIGS as NATIVE_CONFIGS
from tests.engine.native.execution.test_oom_split import ScarceMemory
from tests.marks import mostly_full


def test_drafts_are_verified_where_own_kernels_attend_and_steps_run_in_turn(make_engine: MakeEngine) -> None:
    assert make_engine("qwen3").info.verifies_drafts
    assert not make_engine("llama").info.verifies_drafts, "its heads are too small for the kernels of prompts"
    assert not make_engine("qwen3", optimize=False).info.verifies_drafts
    assert not make_engine("qwen3", steps_ahead=1).info.verifies_drafts
    assert not make_engine("qwen3", speculate=False).info.verifies_drafts


@pytest.mark.parametrize("name", mostly_full(NATIVE_CONFIGS, "qwen3"))
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_log_probabilities_of_accepted_tokens_are_equal_by_bits(
    name: str, kind: str, quantize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_with(kind, monkeypatch)
    save_model(tmp_path, NATIVE_CONFIGS[name]())

    def make() -> TorchEngine:
        sizes: dict[str, Any] = {"kv_cache_bytes": 1 << 21, "block_size": 8, "prefix_cache": False}
        return build_torch_engine(EngineConfig(str(tmp_path), dtype="bfloat16", quantize=quantize, **sizes))

    prompts = [[t % 90 for t in prompt] for prompt in family(3).values()]
    news = [
        make_new(f"s{i}", prompt, max_tokens=24, temperature=i % 2, seed=i, logprobs=2, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    reported, drafted_reported, num_steps = Reported(), Reported(), []
    expected = drive(make(), news, after_step=reported)
    draft = random_drafts(random.Random(7), expected, 12)

    def note(result: Any) -> None:
        num_steps.append(result.step_id)
        drafted_reported(result)

    driven = drive(make(), news, after_step=note, draft=draft)
    assert {k: d.output for k, d in driven.items()} == {k: d.output for k, d in expected.items()}
    assert drafted_reported.output == reported.output
    assert len(num_steps) < 24


def test_a_draft_that_does_not_fit_into_memory_is_left_out(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen3")
    news = [make_new("a", [1, 2, 3], max_tokens=9)]
    expected = drive(engine, news)
    scarce = ScarceMemory(monkeypatch)
    scarce.most_rows = 3
    driven = drive(engine, news, draft=random_drafts(random.Random(1), expected, 8))
    assert {k: d.output for k, d in driven.items()} == {k: d.output for k, d in expected.items()}
    assert scarce.num_refused and driven["a"].failure is None
    assert engine.num_used_blocks == 0


@pytest.mark.parametrize(("start", "unfilled"), [(8, 102), (9, None)])
def test_without_its_draft_a_chunk_fills_a_new_block_only_in_part(start: int, unfilled: int | None) -> None:
    sequence = Sequence(make_new("a", range(start + 1)), 1000, ())
    sequence.block_table.extend([100, 101, 102, 103])
    found = without_draft(Chunk(sequence, start, 1, 103, draft=(1,) * 5), 4)
    assert (found.draft, found.unfilled_block, found.end) == ((), unfilled, start + 1)


def test_a_sequence_that_repeats_itself_takes_fewer_steps(make_engine: MakeEngine) -> None:
    """A greedy output that runs in a circle, drafted from itself: 40 tokens in a few steps."""
    engine = make_engine("qwen3")
    new = make_new("a", [5, 6, 7], max_tokens=40, ignore_eos=True)
    expected = drive(engine, [new])["a"].output
    steps = 0

    def count(_: Any) -> None:
        nonlocal steps
        steps += 1

    def rest(s: Driven) -> list[int]:
        return expected[len(s.output) : len(s.output) + 7]

    assert drive(engine, [new], after_step=count, draft=rest)["a"].output == expected
    assert steps == 1 + 39 // 8 + 1


def test_what_else_runs_in_the_step_of_a_draft_is_as_without_it(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen3")
    news = [make_new("a", [1, 2, 3], max_tokens=12), make_new("p", range(1, 40), prompt_logprobs=1, max_tokens=2)]
    alone, together = Reported(), Reported()
    expected = {new.seq_id: drive(engine, [new], after_step=alone)[new.seq_id].output for new in news}
    engine.step(StepPlan(0, start=(news[0],), run=(Run("a", 3),)))
    draft = tuple(expected["a"][1:5])
    result = engine.step(StepPlan(1, start=(news[1],), run=(Run("p", 39), Run("a", 1, draft))))
    together(result)
    assert {o.seq_id: o.token_ids for o in result.outputs} == {
        "p": tuple(expected["p"][:1]),
        "a": tuple(expected["a"][1:6]),
    }
    assert [entry.token_id for entry in together.prompt["p"]] == [entry.token_id for entry in alone.prompt["p"]]
