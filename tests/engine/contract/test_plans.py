"""What a plan does to sequences and blocks, and the plans that are refused. `CheckedEngine` counts the blocks."""

from collections.abc import Callable

import pytest

from engine.interface import FinishReason, NewSequence, PlanError, Preempt, PreemptionMode, Run, StepPlan
from tests.engine.contract.checked_engine import CheckedEngine
from tests.engine.contract.conftest import MakeNew
from tests.engine.contract.engines import POISON, VOCAB_SIZE
from tests.engine.drive import drive, make_new

PAUSE, RECOMPUTE = PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE


def test_a_token_is_sampled_when_the_prefill_has_caught_up(engine: CheckedEngine, new: MakeNew) -> None:
    block = engine.info.block_size
    total = 2 * block + 2
    engine.step(StepPlan(0, start=(new("a", [3] * total),)))
    for computed, num_tokens in ((block - 1, block - 1), (2 * block, block + 1), (total, 2)):
        (output,) = engine.run(("a", num_tokens)).outputs
        assert (output.num_computed_tokens, len(output.token_ids)) == (computed, int(computed == total))
    (output,) = engine.run(("a", 1)).outputs
    assert (output.num_computed_tokens, len(output.token_ids)) == (total + 1, 1)


def test_preempted_sequences_keep_or_free_their_blocks(engine: CheckedEngine, new: MakeNew) -> None:
    info = engine.info
    total = 2 * info.block_size + 1
    engine.run(("a", total), start=(new("a", [3] * total, max_tokens=9),))
    for mode, num_free in ((PAUSE, info.num_blocks - 3), (RECOMPUTE, info.num_blocks)):
        assert engine.step(StepPlan(0, preempt=(Preempt("a", mode),))).free_blocks == num_free
    (output,) = engine.run(("a", total + 1), resume=("a",)).outputs
    assert (output.num_computed_tokens, len(output.token_ids)) == (total + 1, 1)


def test_a_swapped_sequence_computes_nothing_again(engine: CheckedEngine, new: MakeNew) -> None:
    if "swap" not in engine.info.preemption_modes:
        pytest.skip("this engine does not swap")
    total = 2 * engine.info.block_size + 1
    engine.run(("a", total), start=(new("a", [3] * total, max_tokens=9),))
    result = engine.step(StepPlan(0, preempt=(Preempt("a", PreemptionMode.SWAP),)))
    assert result.free_blocks == engine.info.num_blocks
    (output,) = engine.run(("a", 1), resume=("a",)).outputs
    assert (output.num_computed_tokens, len(output.token_ids)) == (total + 1, 1)


def test_a_plans_runs_can_use_blocks_that_it_frees(engine: CheckedEngine, new: MakeNew) -> None:
    size = 3 * engine.info.block_size
    engine.occupy(engine.info.num_blocks - 4)
    engine.run(("a", size - 1), start=(new("a", [3] * (size - 1)),))
    change = {"preempt": (Preempt("a", RECOMPUTE),), "start": (new("b", [4] * (size - 1)),)}
    assert engine.run(("b", size - 1), **change).outputs[0].seq_id == "b"
    (output,) = engine.run(("a", size), abort=("b",), resume=("a",)).outputs
    assert output.num_computed_tokens == size


def test_outputs_are_in_the_order_of_the_plan(engine: CheckedEngine, new: MakeNew) -> None:
    news = [new(f"s{i}", range(1, 3 + 2 * (i % 3))) for i in range(6)]
    first = [(n.seq_id, len(n.prompt_token_ids)) for n in news]
    assert [o.seq_id for o in engine.run(*first, start=tuple(news)).outputs] == [n.seq_id for n in news]
    later = [("s4", 1), ("s0", 1), ("s5", 1)]
    assert [o.seq_id for o in engine.run(*later).outputs] == ["s4", "s0", "s5"]


def test_an_empty_plan_does_nothing(engine: CheckedEngine) -> None:
    result = engine.step(StepPlan(0))
    assert (result.outputs, result.failures, result.free_blocks) == ((), (), engine.info.num_blocks)


def test_an_id_may_be_used_again(engine: CheckedEngine, new: MakeNew) -> None:
    """After an end, after an abort, and in the plan that aborts: nothing of the old sequence is left."""
    prompts = {"first": [3] * 9, "second": [4] * 5}
    alone = {name: drive(engine, [new("a", prompt)])["a"].output for name, prompt in prompts.items()}
    engine.run(("a", 9), start=(new("a", prompts["first"]),))
    (output,) = engine.run(("a", 5), abort=("a",), start=(new("a", prompts["second"]),)).outputs
    tokens = [*output.token_ids]
    while output.finish_reason is None:
        (output,) = engine.run(("a", 1)).outputs
        tokens += output.token_ids
    assert tokens == alone["second"]
    assert drive(engine, [new("a", prompts["first"])])["a"].output == alone["first"]


@pytest.mark.parametrize("mode", [None, PAUSE, RECOMPUTE])
def test_aborts_leave_the_others(engine: CheckedEngine, new: MakeNew, mode: PreemptionMode | None) -> None:
    """Sequences are aborted in their prefill, in their decode, and while they are preempted."""
    options = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    news = [new(f"s{i}", range(1 + i, 12 + i), seed=i, **options) for i in range(4)]
    alone = {n.seq_id: drive(engine, [n])[n.seq_id].output for n in news}
    outputs: dict[str, list[int]] = {n.seq_id: [] for n in news}
    first = engine.run(("s0", 11), ("s1", 11), ("s2", 5), ("s3", 11), start=tuple(news))
    victims = ("s1", "s2")
    preempt = tuple(Preempt(victim, mode) for victim in victims) if mode else ()
    second = engine.run(("s0", 1), ("s3", 1), preempt=preempt)
    results = [first, second, engine.run(("s0", 1), ("s3", 1), abort=victims)]
    results += [engine.run(("s0", 1), ("s3", 1)) for _ in range(3)]
    for output in [output for result in results for output in result.outputs]:
        outputs[output.seq_id] += output.token_ids
    assert {k: outputs[k] for k in ("s0", "s3")} == {k: alone[k] for k in ("s0", "s3")}
    with pytest.raises(PlanError, match="s1"):
        engine.run(("s1", 1))


def test_equal_beginnings_share_blocks(engine: CheckedEngine, new: MakeNew) -> None:
    block = engine.info.block_size
    trunk = [5] * (2 * block)
    engine.run(("a", 2 * block + 2), start=(new("a", [*trunk, 6, 7]),))
    result = engine.run(("b", 2 * block + 1), start=(new("b", [*trunk, 8]),))
    assert (result.outputs[0].num_cached_tokens, result.free_blocks) == (2 * block, engine.info.num_blocks - 4)
    assert dict(result.shared_blocks) == {"a": 2, "b": 2}
    result = engine.step(StepPlan(0, abort=("a",)))
    assert dict(result.shared_blocks)["b"] == 0 and result.free_blocks == engine.info.num_blocks - 3


def test_generated_tokens_are_found_again(computing_engine: CheckedEngine, new: MakeNew) -> None:
    engine, block = computing_engine, computing_engine.info.block_size
    prompt = [*range(1, 20)] * 30
    options = {"max_tokens": 6, "ignore_eos": True}
    first = drive(engine, [new("first", prompt[: 2 * block - 2], **options)])["first"]
    known = [*prompt[: 2 * block - 2], *first.output[:4]]
    again = drive(engine, [new("again", known, **{**options, "max_tokens": 2})])["again"]
    assert (again.num_cached, again.output) == (2 * block, first.output[4:])


def test_other_salts_never_hit(engine: CheckedEngine, new: MakeNew) -> None:
    prompt = [9] * (2 * engine.info.block_size + 1)
    drive(engine, [new("mine", prompt)])
    other = drive(engine, [make_new("other", prompt, cache_salt="the other test's")])["other"]
    again = drive(engine, [new("again", prompt)])["again"]
    assert (other.num_cached, again.num_cached) == (0, 2 * engine.info.block_size)
    assert again.output == other.output


def test_a_prompt_with_log_probabilities_takes_nothing_from_the_cache(engine: CheckedEngine, new: MakeNew) -> None:
    prompt = [9] * (2 * engine.info.block_size + 1)
    drive(engine, [new("first", prompt)])
    assert drive(engine, [new("echo", prompt, prompt_logprobs=0)])["echo"].num_cached == 0


# -- plans that break the rules ----------------------------------------------------------------------------------------

PAUSE_A = Preempt("a", PAUSE)
# The engine has "a" and "paused", each with 2 blocks and one uncomputed token, and 2 free blocks.
BAD_PLANS: dict[str, Callable[[int, CheckedEngine], StepPlan]] = {
    "runs an unknown sequence": lambda block, e: StepPlan(0, run=(Run("b", 1),)),
    "aborts an unknown sequence": lambda block, e: StepPlan(0, abort=("b",)),
    "preempts an unknown sequence": lambda block, e: StepPlan(0, preempt=(Preempt("b", PAUSE),)),
    "resumes an unknown sequence": lambda block, e: StepPlan(0, resume=("b",)),
    "runs what it aborts": lambda block, e: StepPlan(0, abort=("a",), run=(Run("a", 1),)),
    "aborts twice": lambda block, e: StepPlan(0, abort=("a", "a")),
    "runs a paused sequence": lambda block, e: StepPlan(0, run=(Run("paused", 1),)),
    "runs what it pauses": lambda block, e: StepPlan(0, preempt=(PAUSE_A,), run=(Run("a", 1),)),
    "pauses twice": lambda block, e: StepPlan(0, preempt=(PAUSE_A, PAUSE_A)),
    "pauses a paused sequence": lambda block, e: StepPlan(0, preempt=(Preempt("paused", PAUSE),)),
    "resumes what is not preempted": lambda block, e: StepPlan(0, resume=("a",)),
    "runs more than is uncomputed": lambda block, e: StepPlan(0, run=(Run("a", 2),)),
    "runs nothing of a sequence": lambda block, e: StepPlan(0, run=(Run("a", 0),)),
    "runs a sequence twice": lambda block, e: StepPlan(0, run=(Run("a", 1), Run("a", 1))),
    "starts what exists": lambda block, e: starting(make_new("a", [1])),
    "starts twice": lambda block, e: starting(make_new("b", [1]), make_new("b", [1])),
    "starts with an empty prompt": lambda block, e: starting(make_new("b", [])),
    "starts with a prompt that fills the context": lambda block, e: starting(make_new("b", [1] * e.info.max_model_len)),
    "starts with a token outside the vocabulary": lambda block, e: starting(make_new("b", [e.info.vocab_size])),
    "starts with a negative token": lambda block, e: starting(make_new("b", [-1])),
    "starts with max_tokens 0": lambda block, e: starting(make_new("b", [1], max_tokens=0)),
    "starts with a grammar that is not compiled": lambda block, e: starting(make_new("b", [1], grammar="start: /a/")),
    "runs more tokens than a step may": lambda block, e: starting(
        *(make_new(f"b{i}", [1] * (e.info.max_model_len - 1)) for i in range(2)),
        run=tuple(Run(f"b{i}", e.info.max_step_tokens // 2 + 1) for i in range(2)),
    ),
    "needs more blocks than are free": lambda block, e: starting(
        make_new("b", [1] * (2 * block + 1)), run=(Run("b", 2 * block + 1),)
    ),
    "breaks a rule at its end": lambda block, e: StepPlan(
        0,
        abort=("paused",),
        preempt=(Preempt("a", RECOMPUTE),),
        resume=("a",),
        start=(make_new("b", [1]),),
        run=(Run("b", 1), Run("a", 99)),
    ),
}


def starting(*news: NewSequence, run: tuple[Run, ...] = ()) -> StepPlan:
    return StepPlan(0, start=news, run=run)


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_breaks_the_rules_changes_nothing(engine: CheckedEngine, new: MakeNew, name: str) -> None:
    block = engine.info.block_size
    engine.occupy(engine.info.num_blocks - 6)
    news = [new(seq_id, [1 + i] * (block + 1), max_tokens=2) for i, seq_id in enumerate(("a", "paused"))]
    engine.run(*((n.seq_id, block + 1) for n in news), start=tuple(news), preempt=())
    before = engine.step(StepPlan(0, preempt=(Preempt("paused", PAUSE),))).free_blocks
    assert before == 2
    with pytest.raises(PlanError):
        engine.step(BAD_PLANS[name](block, engine))
    a, paused = engine.run(("a", 1), ("paused", 1), resume=("paused",)).outputs
    assert (a.num_computed_tokens, paused.num_computed_tokens) == (block + 2, block + 2)
    assert (a.finish_reason, paused.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)


# The engine has "a", which may sample three more tokens, "b" with a penalty, and "c", whose prompt is not computed yet.
BAD_DRAFTS: dict[str, Callable[[int], Run]] = {
    "of what is left of a prompt": lambda block: Run("c", 2, (1,)),
    "of a part of a prompt": lambda block: Run("c", 1, (1,)),
    "of altered logits": lambda block: Run("b", 1, (1,)),
    "that leaves no room for a token": lambda block: Run("a", 1, (1, 1, 1)),
    "of an unknown sequence": lambda block: Run("d", 1, (1,)),
    "of a token outside the vocabulary": lambda block: Run("a", 1, (1, VOCAB_SIZE)),
    "of a negative token": lambda block: Run("a", 1, (-1,)),
    "that needs more blocks than are free": lambda block: Run("long", 1, (1,) * (block + 1)),
}


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_a_draft_that_breaks_the_rules_changes_nothing(engine: CheckedEngine, new: MakeNew, name: str) -> None:
    block = engine.info.block_size
    engine.occupy(engine.info.num_blocks - 5)
    options = ({"max_tokens": 4}, {"frequency_penalty": 1.0}, {}, {"max_tokens": 99})
    news = [new(i, [3] * 3, ignore_eos=True, **more) for i, more in zip(("a", "b", "c", "long"), options, strict=True)]
    engine.run(("a", 3), ("b", 3), ("c", 1), ("long", 3), start=tuple(news))
    run = BAD_DRAFTS[name](block)
    with pytest.raises(PlanError, match="draft|blocks|vocabulary|no sequence|uncomputed"):
        engine.step(StepPlan(0, run=(run,)))
    if engine.info.verifies_drafts:
        (output,) = engine.step(StepPlan(0, run=(Run("a", 1, (1, 1)),))).outputs
        assert 4 <= output.num_computed_tokens <= 6


def test_a_draft_takes_part_in_the_limit_of_a_step(engine: CheckedEngine, new: MakeNew) -> None:
    most = engine.info.max_step_tokens
    count = engine.info.max_model_len - 4
    news = [new(i, [3] * 3, max_tokens=999) for i in "ab"]
    engine.run(*((n.seq_id, 3) for n in news), start=tuple(news))
    with pytest.raises(PlanError, match="in a step" if 2 * count > most else ""):
        engine.step(StepPlan(0, run=(Run("a", 1, (1,) * (count - 1)), Run("b", 1, (1,) * (count - 1)))))


def test_blocks_of_a_rejected_draft_are_free_again(engine: CheckedEngine, new: MakeNew) -> None:
    if not engine.info.verifies_drafts:
        pytest.skip("this engine verifies no drafts")
    block = engine.info.block_size
    right = drive(engine, [new("right", [3] * block, max_tokens=3, ignore_eos=True)])["right"].output
    engine.run(("a", block), start=(new("a", [3] * block, max_tokens=99, ignore_eos=True),))
    result = engine.step(StepPlan(0, run=(Run("a", 1, (right[1], right[2] % 90 + 1, *[1] * 2 * block)),)))
    (output,) = result.outputs
    assert output.token_ids == tuple(right[1:3]) and output.num_computed_tokens == block + 2
    assert result.free_blocks == engine.info.num_blocks - 2
    engine.step(StepPlan(0, abort=("a",)))
    again = drive(engine, [new("again", [*[3] * block, right[0], right[1], *[1] * block], max_tokens=1)])["again"]
    assert again.num_cached == block, "no block with a rejected token is found"


def test_no_block_that_ends_with_a_rejected_token_is_found(engine: CheckedEngine, new: MakeNew) -> None:
    """The text with the sampled token in its place is that of a full block, whose last slot holds something else."""
    if not engine.info.verifies_drafts:
        pytest.skip("this engine verifies no drafts")
    block = engine.info.block_size
    prompt = [3] * (2 * block - 2)
    right = drive(engine, [new("right", prompt, max_tokens=3, ignore_eos=True, cache_salt="alone")])["right"].output
    engine.run(("a", len(prompt)), start=(new("a", prompt, max_tokens=9, ignore_eos=True),))
    (output,) = engine.step(StepPlan(0, run=(Run("a", 1, (right[1] % 90 + 1,)),))).outputs
    assert (output.token_ids, output.num_computed_tokens) == ((right[1],), 2 * block - 1)
    engine.step(StepPlan(0, abort=("a",)))
    again = drive(engine, [new("again", [*prompt, *right], max_tokens=1)])["again"]
    assert again.num_cached == block


def test_tokens_that_break_the_model_are_harmless_in_a_draft(computing_engine: CheckedEngine, new: MakeNew) -> None:
    """The logits after them are NaN, and are not looked at."""
    engine = computing_engine
    if not engine.info.verifies_drafts:
        pytest.skip("this engine verifies no drafts")
    expected = drive(engine, [new("alone", [3, 4, 5], ignore_eos=True)])["alone"].output
    news = [new("drafted", [3, 4, 5], ignore_eos=True)]
    drafted = drive(engine, news, draft=lambda s: [expected[len(s.output)], POISON, 1, POISON])["drafted"]
    assert (drafted.output, drafted.failure) == (expected, None)


def test_an_engine_that_does_not_swap_refuses_to(engine: CheckedEngine, new: MakeNew) -> None:
    if "swap" in engine.info.preemption_modes:
        pytest.skip("this engine swaps")
    engine.run(("a", 3), start=(new("a", [1, 2, 3]),))
    with pytest.raises(PlanError, match="swap"):
        engine.step(StepPlan(0, preempt=(Preempt("a", PreemptionMode.SWAP),)))


def test_more_steps_in_flight_than_the_engine_takes_are_refused(engine: CheckedEngine, new: MakeNew) -> None:
    engine.submit(StepPlan(0, start=(new("a", [1, 2, 3], max_tokens=20),), run=(Run("a", 3),)))
    for _ in range(engine.info.steps_ahead):
        engine.submit(StepPlan(0, run=(Run("a", 1),), ahead=True))
    with pytest.raises((PlanError, RuntimeError), match="in flight"):
        engine.submit(StepPlan(0, run=(Run("a", 1),), ahead=True))
    for num_computed in range(3, 4 + engine.info.steps_ahead):
        assert engine.collect().outputs[0].num_computed_tokens == num_computed
