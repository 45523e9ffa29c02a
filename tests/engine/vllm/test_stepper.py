"""The engine over vLLM's executor, with an executor of the test's own in place of vLLM."""

import asyncio
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from demo_model.location import demo_model_path
from engine.grammar import Bits
from engine.interface import EngineDead, EngineInfo, FinishReason, Preempt, PreemptionMode, Run, StepPlan
from engine.sampling.sequence_state import BROKEN_LOGITS, NOTHING_LEFT
from engine.sequences.chunk import Chunk, Outcome
from engine.thread import EngineThread
from engine.vllm.constraints import Constraints
from engine.vllm.stepper import VllmStepper
from tests.engine.drive import compiled, drive, make_new
from tests.engine.vllm.scripted import ScriptedExecutor

INFO = EngineInfo(
    str(demo_model_path()),
    max_model_len=64,
    vocab_size=1024,
    block_size=4,
    num_blocks=64,
    max_step_tokens=64,
    eos_token_ids=(4,),
    steps_ahead=1,
)


def count_up(chunk: Chunk, mask: Bits | None) -> Outcome:
    """Sample 100 + the number of the sequence's tokens, whatever the mask says."""
    return Outcome((100 + chunk.end,) if chunk.samples else ())


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor(count_up)


@pytest.fixture
def stepper(executor: ScriptedExecutor) -> Iterator[VllmStepper]:
    stepper = make_stepper(executor)
    yield stepper
    assert stepper._table.pool.num_free + stepper._table.pool.num_used == INFO.num_blocks


def make_stepper(executor: ScriptedExecutor) -> VllmStepper:
    return VllmStepper(INFO, executor, Constraints(INFO), prefix_cache=True)


def test_the_executor_is_told_what_was_lost_and_what_has_ended(
    stepper: VllmStepper, executor: ScriptedExecutor
) -> None:
    stepper.step(StepPlan(0, start=(make_new("a", range(9)), make_new("b", range(9))), run=(Run("a", 9), Run("b", 9))))
    lose = StepPlan(1, preempt=(Preempt("a", PreemptionMode.RECOMPUTE),), resume=("a",), run=(Run("a", 10),))
    stepper.step(lose)
    stepper.step(StepPlan(2, abort=("b",), run=(Run("a", 1),)))
    stepper.step(StepPlan(3, run=(Run("a", 1),)))
    assert [(set(b.lost), set(b.ended)) for b in executor.batches] == [
        (set(), set()),
        ({"a"}, set()),
        (set(), {"b"}),
        (set(), set()),
    ]


def test_a_step_of_more_sequences_than_the_executor_takes_is_several_batches() -> None:
    executor = ScriptedExecutor(count_up, max_num_seqs=2)
    stepper = make_stepper(executor)
    news = tuple(make_new(f"s{i}", range(5)) for i in range(5))
    result = stepper.step(StepPlan(0, start=news, run=tuple(Run(new.seq_id, 5) for new in news)))
    assert [len(batch.chunks) for batch in executor.batches] == [2, 2, 1]
    assert [(o.seq_id, o.token_ids) for o in result.outputs] == [(new.seq_id, (105,)) for new in news]


def test_broken_logits_end_one_sequence() -> None:
    broken = Outcome(7, failure=BROKEN_LOGITS)
    executor = ScriptedExecutor(lambda c, _: broken if c.sequence.seq_id == "bad" and c.samples else Outcome((7,)))
    driven = drive(make_stepper(executor), [make_new("good", range(9)), make_new("bad", range(20, 29))])
    assert driven["bad"].failure == BROKEN_LOGITS
    assert driven["good"].output == [7] * 8


def test_options_that_leave_no_token_end_one_sequence(stepper: VllmStepper, executor: ScriptedExecutor) -> None:
    nothing = make_new("nothing", range(9), allowed_token_ids=(5,), bad_words=((5,),))
    driven = drive(stepper, [make_new("good", range(9)), nothing])
    assert driven["nothing"].failure == NOTHING_LEFT
    assert len(driven["good"].output) == 8
    assert all("nothing" not in {c.sequence.seq_id for c in batch.chunks} for batch in executor.batches)


DIGITS = LLMatcher.grammar_from_regex("[0-9]{3}")


def test_masks_follow_the_grammar() -> None:
    stepper = make_stepper(ScriptedExecutor())
    driven = drive(stepper, [make_new("digits", range(9), grammar=DIGITS), make_new("free", range(9))])
    assert driven["digits"].finish_reason is FinishReason.STOP
    assert len(driven["free"].output) == 8


def test_an_output_against_its_grammar_ends_one_sequence(stepper: VllmStepper) -> None:
    driven = drive(stepper, [make_new("digits", range(9), grammar=DIGITS), make_new("free", range(9))])
    assert str(driven["digits"].failure).startswith("the grammar cannot be followed")
    assert len(driven["free"].output) == 8


def test_a_step_ahead_continues_a_sequence_whose_token_is_not_known_yet(
    stepper: VllmStepper, executor: ScriptedExecutor
) -> None:
    executor.holds = True
    ends = make_new("ends", range(20, 29), stop_token_ids=(109,))
    stepper.launch(StepPlan(0, start=(make_new("a", range(9)), ends), run=(Run("a", 9), Run("ends", 9))))
    stepper.launch(StepPlan(1, run=(Run("a", 1), Run("ends", 1)), ahead=True))
    assert len(executor.batches) == 2 and not stepper.is_finished
    executor.release()
    first, second = stepper.finalize(), stepper.finalize()
    assert [(o.seq_id, o.token_ids) for o in first.outputs] == [("a", (109,)), ("ends", (109,))]
    assert [(o.seq_id, o.token_ids) for o in second.outputs] == [("a", (110,))], "the other one has ended"
    executor.holds = False
    stepper.step(StepPlan(2, run=(Run("a", 1),)))
    assert executor.batches[-1].ended == {"ends"}
    stepper.step(StepPlan(3, abort=("a",)))


def test_a_step_ahead_with_a_grammar_waits_for_its_tokens() -> None:
    executor = ScriptedExecutor()
    stepper = make_stepper(executor)
    stepper.launch(StepPlan(0, start=(compiled(stepper, make_new("a", range(9), grammar=DIGITS)),), run=(Run("a", 9),)))
    stepper.launch(StepPlan(1, run=(Run("a", 1),), ahead=True))
    (first,), (second,) = stepper.finalize().outputs, stepper.finalize().outputs
    assert first.token_ids and second.token_ids
    assert len(executor.batches[1].masks) == 1


async def test_an_executor_that_dies_ends_the_engine(executor: ScriptedExecutor) -> None:
    engine = EngineThread(lambda: make_stepper(executor))
    engine.submit(StepPlan(0, start=(make_new("a", range(9)),), run=(Run("a", 9),)))
    assert len((await engine.collect()).outputs) == 1
    executor.death = RuntimeError("a worker process died")
    engine.submit(StepPlan(1, run=(Run("a", 1),)))
    with pytest.raises(EngineDead, match="a worker process died"):
        await engine.collect()
    with pytest.raises(RuntimeError, match="a worker process died"):
        engine._stepper.check_alive()
    engine.close()
    assert executor.is_closed


async def test_results_arrive_without_another_plan(executor: ScriptedExecutor) -> None:
    """The thread is woken by the step's end: nothing else would wake it."""
    engine = EngineThread(lambda: make_stepper(executor))
    executor.holds = True
    engine.submit(StepPlan(0, start=(make_new("a", range(9)),), run=(Run("a", 9),)))
    while not executor.batches:
        await asyncio.sleep(0)
    executor.release()
    assert len((await engine.collect()).outputs) == 1
    engine.submit(StepPlan(1))
    assert (await engine.collect()).outputs == ()
    engine.close()
