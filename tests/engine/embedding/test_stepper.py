"""Steps of an encoder: whole texts, one token for each, its vector beside it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig, EngineStartError
from engine.embedding.stepper import STANDS_FOR_VECTOR, EmbeddingStepper, Text
from engine.factory import build_engine
from engine.interface import EngineInfo, FinishReason, NewSequence, PlanError, Run, SamplingParams, StepPlan
from scheduler.clock import SystemClock
from scheduler.drivers.steps.warmup import warm_up
from tests.encoders import CONTEXT, DIMENSIONS, WORDS

ONE = SamplingParams(max_tokens=1)
INFO = EngineInfo("m", CONTEXT + 1, len(WORDS), 16, 64, max_step_tokens=32, whole_prompts=True)


class Lengths:
    """An encoder whose vectors are the length of the text and where its second text begins; NaN for a text of 13."""

    def encode(self, texts: Sequence[Text]) -> list[bytes]:
        rows = [(len(ids) if len(ids) != 13 else np.nan, second_from) for ids, second_from in texts]
        return [np.array(row, "<f4").tobytes() for row in rows]


@pytest.fixture
def stepper() -> EmbeddingStepper:
    return EmbeddingStepper(INFO, Lengths())


def new(name: str, length: int, second_from: int = 0) -> NewSequence:
    return NewSequence(name, (5,) * length, ONE, second_from=second_from)


def plan(*starting: NewSequence, step_id: int = 1) -> StepPlan:
    return StepPlan(step_id, start=starting, run=tuple(Run(s.seq_id, len(s.prompt_token_ids)) for s in starting))


def test_each_text_ends_with_its_vector(stepper: EmbeddingStepper) -> None:
    stepper.launch(plan(new("a", 4), new("b", 9, second_from=3)))
    result = stepper.finalize()
    assert [(o.seq_id, o.token_ids, o.finish_reason) for o in result.outputs] == [
        ("a", (STANDS_FOR_VECTOR,), FinishReason.LENGTH),
        ("b", (STANDS_FOR_VECTOR,), FinishReason.LENGTH),
    ]
    assert [np.frombuffer(o.vector, "<f4").tolist() for o in result.outputs] == [[4, 0], [9, 3]]
    assert result.free_blocks == INFO.num_blocks


def test_a_vector_that_is_no_number_fails_its_text_alone(stepper: EmbeddingStepper) -> None:
    stepper.launch(plan(new("a", 4), new("odd", 13)))
    result = stepper.finalize()
    assert [o.seq_id for o in result.outputs] == ["a"]
    assert [f.seq_id for f in result.failures] == ["odd"]
    assert result.free_blocks == INFO.num_blocks
    stepper.launch(plan(new("odd", 5), step_id=2))  # its name is free again
    assert stepper.finalize().outputs


def test_half_a_text_is_refused(stepper: EmbeddingStepper) -> None:
    with pytest.raises(PlanError, match="as a whole"):
        stepper.launch(StepPlan(1, start=(new("a", 8),), run=(Run("a", 4),)))


def test_what_goes_on_behind_its_vector_fails_alone(stepper: EmbeddingStepper) -> None:
    """A gateway that takes the model for a chat must not end the worker."""
    chat = NewSequence("chat", (5,) * 4, SamplingParams(max_tokens=8))
    stepper.launch(plan(chat))
    assert [o.finish_reason for o in stepper.finalize().outputs] == [None]
    stepper.launch(StepPlan(2, start=(new("a", 3),), run=(Run("chat", 1), Run("a", 3))))
    result = stepper.finalize()
    assert ([o.seq_id for o in result.outputs], [f.seq_id for f in result.failures]) == (["a"], ["chat"])
    assert result.free_blocks == INFO.num_blocks


def test_a_text_longer_than_a_step_runs_alone(stepper: EmbeddingStepper) -> None:
    long = INFO.max_step_tokens + 1
    stepper.launch(plan(new("a", long)))
    assert stepper.finalize().outputs
    with pytest.raises(PlanError, match="tokens in a step"):
        stepper.launch(plan(new("b", long), new("c", 1), step_id=2))


async def test_the_engine_is_built_warmed_up_and_used(encoder_path: Path) -> None:
    engine = build_engine(EngineConfig(str(encoder_path), engine="embedding", kind="embedding", num_threads=1))
    try:
        assert (engine.info.max_model_len, engine.info.dtype) == (CONTEXT + 1, "float32")
        times: list[float] = []
        await warm_up(engine, lambda work, seconds: times.append(seconds), SystemClock(), budget_s=30)
        assert len(times) > 4 and min(times) > 0
        engine.submit(plan(new("a", CONTEXT)))
        [output] = (await engine.collect()).outputs
        assert len(output.vector) == 4 * DIMENSIONS
    finally:
        engine.close()


@pytest.mark.parametrize(("wanted", "found"), [(20, 20), (10_000, CONTEXT)])
def test_a_shorter_context_is_kept_and_a_longer_one_is_the_models(encoder_path: Path, wanted: int, found: int) -> None:
    config = EngineConfig(str(encoder_path), engine="embedding", kind="embedding", max_model_len=wanted)
    engine = build_engine(config)
    engine.close()
    assert engine.info.max_model_len == found + 1


def refusal(**config: object) -> str:
    with pytest.raises(EngineStartError) as caught:
        build_engine(EngineConfig(engine="embedding", **config))  # type: ignore[arg-type]
    return str(caught.value)


def test_what_cannot_start_says_what_to_do(encoder_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(encoder_path)
    assert "--kind embedding" in refusal(model=path, kind="chat")
    assert "--load-format" in refusal(model=path, kind="embedding", load_format="dummy")
    monkeypatch.setattr("engine.embedding.build.find_spec", lambda name: None)
    assert "pip install 'tidegate[embedding]'" in refusal(model=path, kind="embedding")
