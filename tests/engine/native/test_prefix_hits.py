"""A sequence that finds its beginning in the prefix cache computes less and gets the same tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from engine.native.batch.packing import StepBatch
from engine.native.execution.torch_engine import TorchEngine
from tests.engine.conftest import MakeEngine
from tests.engine.drive import drive, make_new


@pytest.fixture
def count_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[TorchEngine], list[int]]:
    """Record the number of tokens in each forward pass of an engine."""

    def watch_passes(engine: TorchEngine) -> list[int]:
        rows: list[int] = []
        run = engine._runner.run

        def counted(batch: StepBatch, **more: Any) -> Tensor | None:
            rows.append(batch.num_rows)
            return run(batch, **more)

        monkeypatch.setattr(engine._runner, "run", counted)
        return rows

    return watch_passes


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_hit_skips_work_and_changes_no_token(
    name: str, make_engine: MakeEngine, count_rows: Callable[[TorchEngine], list[int]]
) -> None:
    engine = make_engine(name)
    rows = count_rows(engine)
    prompt = range(1, 31)
    first = drive(engine, [make_new("first", prompt)])["first"]
    assert (first.num_cached, rows) == (0, [30] + [1] * 7)
    rows.clear()
    second = drive(engine, [make_new("second", prompt)])["second"]
    assert (second.num_cached, rows) == (28, [2] + [1] * 7), "seven full blocks are not computed again"
    assert second.output == first.output
    third = drive(engine, [make_new("third", [*prompt, *first.output[:5]], max_tokens=3)])["third"]
    assert third.num_cached == 32, "generated tokens are cached, too"
    assert third.output == first.output[5:8]


def test_the_cache_can_be_turned_off(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    for name in ("first", "second"):
        assert drive(engine, [make_new(name, range(1, 31))])[name].num_cached == 0
