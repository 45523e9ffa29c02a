"""The torch engine: blocks, refused plans, finished and failed sequences."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.factory import build_torch_engine
from engine.interface import (
    FinishReason,
    PlanError,
    Preempt,
    PreemptionMode,
    Run,
    StepPlan,
    StepResult,
    blocks_for,
)
from engine.native.execution.torch_engine import TorchEngine
from tests.engine.conftest import MakeEngine
from tests.engine.drive import drive, make_new, random_chunks, random_preemption
from tests.engine.models import CONFIGS, VOCAB_SIZE, save_model

# The tiny Llama: 2 layers × keys and values × 2 heads × 4 tokens × 8 numbers of 4 bytes.
BLOCK_BYTES = 2 * 2 * 2 * 4 * 8 * 4


def start(engine: TorchEngine, seq_id: str = "a", prompt: range = range(1, 11), **sampling: Any) -> StepResult:
    """Start one sequence and compute its prompt."""
    new = make_new(seq_id, prompt, **sampling)
    return engine.step(StepPlan(0, start=(new,), run=(Run(seq_id, len(new.prompt_token_ids)),)))


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 6))
def test_blocks_are_conserved_after_every_step(make_engine: MakeEngine, seed: int, count: int) -> None:
    rng = random.Random(seed)
    engine = make_engine()
    total = engine.info.num_blocks
    news = [
        make_new(str(i), [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))], max_tokens=rng.randint(1, 9))
        for i in range(count)
    ]

    def check(result: StepResult) -> None:
        assert engine.num_free_blocks + engine.num_used_blocks == total
        assert result.free_blocks == engine.num_free_blocks

    preempt = random_preemption(rng, 0.3, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
    driven = drive(engine, news, random_chunks(rng, 8), preempt, arrivals_a_step=2, after_step=check)
    assert [len(d.output) for d in driven.values()] == [n.sampling.max_tokens for n in news]
    assert engine.num_free_blocks == total


def test_blocks_are_taken_as_tokens_are_run(make_engine: MakeEngine) -> None:
    engine = make_engine()
    total = engine.info.num_blocks
    engine.step(StepPlan(0, start=(make_new("a", range(1, 11)),)))
    assert engine.num_free_blocks == total
    for num_tokens in (3, 5, 2):
        result = engine.step(StepPlan(1, run=(Run("a", num_tokens),)))
        (output,) = result.outputs
        assert engine.num_used_blocks == blocks_for(output.num_computed_tokens, 4)
        assert bool(output.token_ids) == (output.num_computed_tokens == 10)
    engine.step(StepPlan(2, preempt=(Preempt("a", PreemptionMode.PAUSE),)))
    assert engine.num_used_blocks == 3
    engine.step(StepPlan(3, preempt=(Preempt("a", PreemptionMode.RECOMPUTE),)))
    assert engine.num_used_blocks == 0
    engine.step(StepPlan(4, resume=("a",), run=(Run("a", 11),)))
    assert engine.num_used_blocks == 3
    engine.step(StepPlan(5, abort=("a",)))
    assert engine.num_used_blocks == 0


PAUSE_A = Preempt("a", PreemptionMode.PAUSE)
BAD_PLANS = {
    "runs an unknown sequence": StepPlan(1, run=(Run("b", 1),)),
    "aborts an unknown sequence": StepPlan(1, abort=("b",)),
    "preempts an unknown sequence": StepPlan(1, preempt=(Preempt("b", PreemptionMode.PAUSE),)),
    "resumes an unknown sequence": StepPlan(1, resume=("b",)),
    "runs what it aborts": StepPlan(1, abort=("a",), run=(Run("a", 1),)),
    "aborts twice": StepPlan(1, abort=("a", "a")),
    "runs a paused sequence": StepPlan(1, run=(Run("paused", 1),)),
    "runs what it pauses": StepPlan(1, preempt=(PAUSE_A,), run=(Run("a", 1),)),
    "pauses twice": StepPlan(1, preempt=(PAUSE_A, PAUSE_A)),
    "pauses a paused sequence": StepPlan(1, preempt=(Preempt("paused", PreemptionMode.PAUSE),)),
    "swaps": StepPlan(1, preempt=(Preempt("a", PreemptionMode.SWAP),)),
    "resumes what is not preempted": StepPlan(1, resume=("a",)),
    "runs more than is uncomputed": StepPlan(1, run=(Run("a", 2),)),
    "runs nothing of a sequence": StepPlan(1, run=(Run("a", 0),)),
    "runs a sequence twice": StepPlan(1, run=(Run("a", 1), Run("a", 1))),
    "starts what exists": StepPlan(1, start=(make_new("a", [1]),)),
    "starts twice": StepPlan(1, start=(make_new("b", [1]), make_new("b", [1]))),
    "starts with an empty prompt": StepPlan(1, start=(make_new("b", []),)),
    "starts with a prompt that fills the context": StepPlan(1, start=(make_new("b", [1] * 64),)),
    "starts with a token outside the vocabulary": StepPlan(1, start=(make_new("b", [VOCAB_SIZE]),)),
    "starts with a negative token": StepPlan(1, start=(make_new("b", [-1]),)),
    "starts with max_tokens 0": StepPlan(1, start=(make_new("b", [1], max_tokens=0),)),
    "starts with a grammar that is not compiled": StepPlan(1, start=(make_new("b", [1], grammar="start: /a/"),)),
    "runs more tokens than a step may": StepPlan(1, start=(make_new("b", [1] * 50),), run=(Run("a", 1), Run("b", 40))),
    "needs more blocks than are free": StepPlan(1, start=(make_new("b", [1] * 39),), run=(Run("b", 39),)),
    "breaks a rule at its end": StepPlan(
        1,
        abort=("paused",),
        preempt=(Preempt("a", PreemptionMode.RECOMPUTE),),
        resume=("a",),
        start=(make_new("b", [1]),),
        run=(Run("b", 1), Run("a", 99)),
    ),
}


@pytest.mark.parametrize("plan", BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_a_bad_plan_changes_nothing(plan: StepPlan, make_engine: MakeEngine) -> None:
    # 16 blocks, of which "a" and "paused" hold 4 each: 8 are left, 32 tokens.
    engine = make_engine(kv_cache_bytes=16 * BLOCK_BYTES, max_step_tokens=40, prefix_cache=False)
    assert engine.info.num_blocks == 16
    start(engine, "a", range(1, 14))
    start(engine, "paused", range(1, 14))
    engine.step(StepPlan(0, preempt=(Preempt("paused", PreemptionMode.PAUSE),)))
    with pytest.raises(PlanError):
        engine.step(plan)
    assert engine.num_used_blocks == 8
    resumed = StepPlan(2, resume=("paused",), run=(Run("a", 1), Run("paused", 1)))
    a, paused = engine.step(resumed).outputs
    assert (a.num_computed_tokens, a.token_ids) == (14, paused.token_ids)
    with pytest.raises(PlanError, match="there is no sequence b"):
        engine.step(StepPlan(3, abort=("b",)))


def test_a_plans_runs_can_use_blocks_that_it_frees(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_bytes=5 * BLOCK_BYTES)
    start(engine, "a", range(1, 16))
    assert engine.num_free_blocks == 1
    plan = StepPlan(
        1,
        preempt=(Preempt("a", PreemptionMode.RECOMPUTE),),
        start=(make_new("b", range(1, 16)),),
        run=(Run("b", 15),),
    )
    assert engine.step(plan).outputs[0].seq_id == "b"
    start_again = StepPlan(2, abort=("b",), resume=("a",), run=(Run("a", 16),))
    assert engine.step(start_again).outputs[0].num_computed_tokens == 16


def test_outputs_are_in_the_order_of_the_plan(make_engine: MakeEngine) -> None:
    engine = make_engine()
    news = [make_new(str(i), range(1, 3 + 5 * (i % 3))) for i in range(6)]
    result = engine.step(
        StepPlan(7, start=tuple(news), run=tuple(Run(n.seq_id, len(n.prompt_token_ids)) for n in news))
    )
    assert [o.seq_id for o in result.outputs] == [n.seq_id for n in news]
    assert result.step_id == 7
    assert result.elapsed_s > 0


def test_an_empty_plan_does_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.step(StepPlan(3)).outputs == ()


def test_finish_reasons(make_engine: MakeEngine) -> None:
    prompt = range(1, 11)
    tokens = drive(make_engine(), [make_new("a", prompt, max_tokens=8)])["a"]
    assert (len(tokens.output), tokens.finish_reason) == (8, FinishReason.LENGTH)

    stop = tokens.output[3]
    where = tokens.output.index(stop) + 1
    stopped = drive(make_engine(), [make_new("a", prompt, stop_token_ids=(stop,))])["a"]
    assert (stopped.output, stopped.finish_reason) == (tokens.output[:where], FinishReason.STOP)

    full = drive(make_engine(max_model_len=13), [make_new("a", prompt, max_tokens=100)])["a"]
    assert (full.output, full.finish_reason) == (tokens.output[:3], FinishReason.LENGTH)

    last = drive(make_engine(), [make_new("a", prompt, max_tokens=where, stop_token_ids=(stop,))])["a"]
    assert last.finish_reason is FinishReason.STOP


def test_end_of_sequence_ids_come_from_the_model(tmp_path: Path, make_engine: MakeEngine) -> None:
    output = drive(make_engine(), [make_new("a", range(1, 11), max_tokens=8)])["a"].output
    config = CONFIGS["llama"]()
    config.eos_token_id = [95, output[2]]
    save_model(tmp_path, config)
    engine = build_torch_engine(EngineConfig(str(tmp_path), dtype="float32", device="cpu", max_num_seqs=4))
    assert engine.info.eos_token_ids == (95, output[2])
    ended = drive(engine, [make_new("a", range(1, 11))])["a"]
    assert (ended.output, ended.finish_reason) == (output[: output.index(output[2]) + 1], FinishReason.STOP)
    ignoring = drive(engine, [make_new("a", range(1, 11), ignore_eos=True)])["a"]
    assert (ignoring.output, ignoring.finish_reason) == (output, FinishReason.LENGTH)


POISON = 90


def test_a_poisoned_sequence_fails_alone_and_leaves_clean_blocks(tmp_path: Path) -> None:
    """A sequence with token 90 computes NaN only."""
    save_model(tmp_path, CONFIGS["llama"](), poisoned_token=POISON)
    settings = EngineConfig(
        str(tmp_path),
        dtype="float32",
        device="cpu",
        block_size=4,
        max_model_len=32,
        kv_cache_bytes=24 * BLOCK_BYTES,
    )
    healthy = [make_new(f"h{i}", range(1 + i, 12 + i), max_tokens=6) for i in range(3)]
    expected = {k: d.output for k, d in drive(build_torch_engine(settings), healthy).items()}
    engine = build_torch_engine(settings)
    for i in range(3):  # the second and third time in blocks that held NaN
        poisoned = [make_new(f"p{k}", [5, 6, POISON, 7, 8, 9, 10], max_tokens=6) for k in range(3)]
        driven = drive(engine, [*poisoned[:2], *healthy, poisoned[2]])
        assert {k: d.output for k, d in driven.items() if k.startswith("h")} == expected
        assert all("not finite" in str(driven[p.seq_id].failure) for p in poisoned)
        assert engine.num_used_blocks == 0
        # Aborted before its logits were checked.
        engine.step(StepPlan(0, start=(make_new("q", [i, *[POISON] * 29]),), run=(Run("q", 28),)))
        engine.step(StepPlan(1, abort=("q",)))
