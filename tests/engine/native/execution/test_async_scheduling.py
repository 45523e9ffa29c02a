"""Async scheduling: what only the native engine shows. `tests/engine/contract` compares its tokens with those of steps
that are finalized one by one."""

import pytest

from engine.interface import NewSequence, Run, StepPlan
from engine.native.execution.torch_engine import TorchEngine
from tests.engine.conftest import MakeEngine
from tests.engine.drive import make_new


@pytest.fixture
def engine(make_engine: MakeEngine) -> TorchEngine:
    return make_engine(steps_ahead=1, kv_cache_bytes=1 << 20)


def test_an_ordinary_plan_waits_for_the_step_before_it(engine: TorchEngine) -> None:
    first, second = (make_new(name, range(3, 9), max_tokens=9) for name in "ab")
    engine.launch(StepPlan(0, start=(first,), run=(Run("a", 6),)))
    engine.launch(StepPlan(1, abort=("a",), start=(second,), run=(Run("b", 6),)))
    assert [output.seq_id for output in engine.finalize().outputs] == ["a"]
    assert [output.seq_id for output in engine.finalize().outputs] == ["b"]


def test_a_step_that_samples_nothing_is_launched_ahead_too(engine: TorchEngine) -> None:
    """Otherwise the device would wait for the host after each chunk of a long prompt."""
    new = make_new("a", range(3, 23), max_tokens=2)
    engine.launch(StepPlan(0, start=(new,), run=(Run("a", 8),)))
    engine.launch(StepPlan(1, run=(Run("a", 8),), ahead=True))
    assert [step.step_id for step in engine._in_flight] == [0, 1]
    engine.launch(StepPlan(2, run=(Run("a", 4),), ahead=True))
    outputs = [engine.finalize().outputs[0] for _ in range(3)]
    assert [(o.num_computed_tokens, len(o.token_ids)) for o in outputs] == [(8, 0), (16, 0), (20, 1)]


def test_a_block_filled_with_placeholders_is_cached_with_its_real_tokens(engine: TorchEngine) -> None:
    """A block enters the prefix cache when its tokens are known."""
    new = make_new("a", range(3, 9), max_tokens=18)
    output: list[int] = []
    engine.launch(StepPlan(0, start=(new,), run=(Run("a", 6),)))
    for step_id in range(1, 18):
        engine.launch(StepPlan(step_id, run=(Run("a", 1),), ahead=True))
        output += engine.finalize().outputs[0].token_ids
    output += engine.finalize().outputs[0].token_ids
    again = NewSequence("b", (*new.prompt_token_ids, *output[:-1]), new.sampling)
    result = engine.step(StepPlan(500, start=(again,), run=(Run("b", len(again.prompt_token_ids)),)))
    assert result.outputs[0].num_cached_tokens >= 20
    assert result.outputs[0].token_ids == (output[-1],)
