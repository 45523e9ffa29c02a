"""The engine over vLLM's executor, with an executor of the test's own in place of vLLM."""

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from llguidance import LLMatcher

from demo_model.location import demo_model_path
from engine.grammar import Bits
from engine.interface import EngineDead, EngineInfo, FinishReason, PlanError, Preempt, PreemptionMode, Run, StepPlan
from engine.sampling.sequence_state import BROKEN_LOGITS, NOTHING_LEFT
from engine.sequences.sequence_table import Chunk
from engine.thread import EngineThread
from engine.vllm.batch import Batch, ExecutorDied, Sampled
from engine.vllm.constraints import Constraints
from engine.vllm.stepper import VllmStepper
from tests.engine.drive import compiled, drive, make_new, random_chunks, random_preemption

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


Sample = Callable[[Chunk, Bits | None], Sampled]


def count_up(chunk: Chunk, mask: Bits | None) -> Sampled:
    """Sample 100 + the number of the sequence's tokens."""
    return Sampled(100 + chunk.end if chunk.samples else None)


def lowest_allowed(chunk: Chunk, mask: Bits | None) -> Sampled:
    """Sample the first token that the mask allows; 9 without a mask."""
    if not chunk.samples or mask is None:
        return Sampled(9 if chunk.samples else None)
    return Sampled(int(np.unpackbits(mask.view(np.uint8), bitorder="little").argmax()))


class FakeExecutor:
    """Computes a batch at once, or only when `release` is called if `holds` is set."""

    def __init__(self, sample: Sample = count_up, max_num_seqs: int = 16) -> None:
        self.max_num_seqs = max_num_seqs
        self.batches: list[Batch] = []
        self.holds = False
        self.death: Exception | None = None
        self.is_closed = False
        self._sample = sample
        self._held: list[tuple[Future[dict[str, Sampled]], dict[str, Sampled]]] = []

    def start(self, batch: Batch) -> Future[dict[str, Sampled]]:
        self.batches.append(batch)
        future: Future[dict[str, Sampled]] = Future()
        self._held.append(
            (future, {c.sequence.seq_id: self._sample(c, batch.masks.get(c.sequence.seq_id)) for c in batch.chunks})
        )
        if not self.holds:
            self.release()
        return future

    def release(self) -> None:
        for future, sampled in self._held:
            future.set_exception(self.death) if self.death else future.set_result(sampled)
        self._held.clear()

    def check_alive(self) -> None:
        if self.death is not None:
            raise self.death

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def stepper(executor: FakeExecutor) -> Iterator[VllmStepper]:
    stepper = make_stepper(executor)
    yield stepper
    assert stepper.num_free_blocks + stepper.num_used_blocks == INFO.num_blocks


def make_stepper(executor: FakeExecutor) -> VllmStepper:
    return VllmStepper(INFO, executor, Constraints(INFO), prefix_cache=True)


def test_chunks_pauses_and_recomputing_do_not_change_the_tokens(stepper: VllmStepper) -> None:
    rng = random.Random(2)
    news = [make_new(f"s{i}", range(10, 20 + 3 * i), max_tokens=9) for i in range(5)]
    disturb = random_preemption(rng, 0.3, PreemptionMode.PAUSE, PreemptionMode.RECOMPUTE)
    driven = drive(stepper, news, random_chunks(rng, 5), disturb)
    for s in driven.values():
        num_prompt = len(s.new.prompt_token_ids)
        assert s.output == [100 + num_prompt + i for i in range(9)]
    assert stepper.num_used_blocks == 0


def test_the_executor_is_told_what_was_lost_and_what_has_ended(stepper: VllmStepper, executor: FakeExecutor) -> None:
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
    executor = FakeExecutor(max_num_seqs=2)
    stepper = make_stepper(executor)
    news = tuple(make_new(f"s{i}", range(5)) for i in range(5))
    result = stepper.step(StepPlan(0, start=news, run=tuple(Run(new.seq_id, 5) for new in news)))
    assert [len(batch.chunks) for batch in executor.batches] == [2, 2, 1]
    assert [(o.seq_id, o.token_ids) for o in result.outputs] == [(new.seq_id, (105,)) for new in news]


def test_a_refused_plan_changes_nothing(stepper: VllmStepper, executor: FakeExecutor) -> None:
    with pytest.raises(PlanError):
        stepper.step(StepPlan(0, start=(make_new("a", range(9)),), run=(Run("a", 9), Run("a", 1))))
    with pytest.raises(PlanError, match="uncomputed"):
        stepper.step(StepPlan(1, start=(make_new("a", range(9)),), run=(Run("a", 10),)))
    assert executor.batches == []
    assert stepper.num_used_blocks == 0
    stepper.step(StepPlan(2, start=(make_new("a", range(9)),), run=(Run("a", 9),)))
    with pytest.raises(PlanError, match="swap"):
        stepper.step(StepPlan(3, preempt=(Preempt("a", PreemptionMode.SWAP),)))
    assert [o.token_ids for o in stepper.step(StepPlan(4, run=(Run("a", 1),))).outputs] == [(110,)]
    stepper.step(StepPlan(5, abort=("a",)))


def test_broken_logits_end_one_sequence() -> None:
    executor = FakeExecutor(lambda c, _: Sampled(7, is_broken=c.sequence.seq_id == "bad" and c.samples))
    driven = drive(make_stepper(executor), [make_new("good", range(9)), make_new("bad", range(20, 29))])
    assert driven["bad"].failure == BROKEN_LOGITS
    assert driven["good"].output == [7] * 8


def test_options_that_leave_no_token_end_one_sequence(stepper: VllmStepper, executor: FakeExecutor) -> None:
    nothing = make_new("nothing", range(9), allowed_token_ids=(5,), bad_words=((5,),))
    driven = drive(stepper, [make_new("good", range(9)), nothing])
    assert driven["nothing"].failure == NOTHING_LEFT
    assert len(driven["good"].output) == 8
    assert all("nothing" not in {c.sequence.seq_id for c in batch.chunks} for batch in executor.batches)


DIGITS = LLMatcher.grammar_from_regex("[0-9]{3}")


def test_masks_follow_the_grammar() -> None:
    stepper = make_stepper(FakeExecutor(lowest_allowed))
    driven = drive(stepper, [make_new("digits", range(9), grammar=DIGITS), make_new("free", range(9))])
    assert driven["digits"].finish_reason is FinishReason.STOP
    assert driven["free"].output == [9] * 8


def test_an_output_against_its_grammar_ends_one_sequence(stepper: VllmStepper) -> None:
    driven = drive(stepper, [make_new("digits", range(9), grammar=DIGITS), make_new("free", range(9))])
    assert str(driven["digits"].failure).startswith("the grammar cannot be followed")
    assert len(driven["free"].output) == 8


def test_a_step_ahead_continues_a_sequence_whose_token_is_not_known_yet(
    stepper: VllmStepper, executor: FakeExecutor
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
    executor = FakeExecutor(lowest_allowed)
    stepper = make_stepper(executor)
    stepper.launch(StepPlan(0, start=(compiled(stepper, make_new("a", range(9), grammar=DIGITS)),), run=(Run("a", 9),)))
    stepper.launch(StepPlan(1, run=(Run("a", 1),), ahead=True))
    (first,), (second,) = stepper.finalize().outputs, stepper.finalize().outputs
    assert first.token_ids and second.token_ids
    assert len(executor.batches[1].masks) == 1


async def test_an_executor_that_dies_ends_the_engine(executor: FakeExecutor) -> None:
    engine = EngineThread(lambda: make_stepper(executor))
    engine.submit(StepPlan(0, start=(make_new("a", range(9)),), run=(Run("a", 9),)))
    assert len((await engine.collect()).outputs) == 1
    executor.death = RuntimeError("a worker process died")
    engine.submit(StepPlan(1, run=(Run("a", 1),)))
    with pytest.raises(EngineDead, match="a worker process died"):
        await engine.collect()
    engine.close()
    assert executor.is_closed


async def test_an_executor_that_dies_between_steps_ends_the_engine(executor: FakeExecutor) -> None:
    engine = EngineThread(lambda: make_stepper(executor))
    engine.check_alive()
    executor.death = ExecutorDied("a process has ended")
    with pytest.raises(EngineDead, match="a process has ended"):
        engine.check_alive()
    engine.close()


async def test_results_arrive_without_another_plan(executor: FakeExecutor) -> None:
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


def test_a_sequence_continues_from_tokens_of_another_engine(stepper: VllmStepper, executor: FakeExecutor) -> None:
    new = replace(make_new("a", range(10, 20), max_tokens=9), output_token_ids=(110, 111, 112))
    [driven] = drive(stepper, [new]).values()
    assert driven.output == [110 + i for i in range(9)]
    [chunk] = executor.batches[0].chunks
    assert (chunk.start, chunk.end) == (0, 13)
    assert (chunk.sequence.num_prompt_tokens, chunk.sequence.num_given_tokens) == (10, 13)
