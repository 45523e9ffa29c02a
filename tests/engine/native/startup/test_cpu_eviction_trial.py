"""The trial at start finds out whether rows can be evicted; a model that evictions disturb loses whole steps only."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from engine.interface import StepEviction
from engine.native.execution.torch_engine import TorchEngine
from engine.native.startup.cpu_eviction_trial import can_evict_rows
from tests.engine.conftest import MakeEngine
from tests.engine.native.cpu.compiled import compiled_library

Forward = Callable[..., Any]


@pytest.fixture(autouse=True)
def compiler() -> None:
    compiled_library()


def rows_can_be_evicted(engine: TorchEngine) -> bool:
    return can_evict_rows(engine._runner._model, engine._runner, engine.info)


def copies_wanted_rows_early(forward: Forward) -> Forward:
    """Copy the indices of wanted logits before the first layer."""
    return lambda *args, logits_to_keep, **more: forward(*args, logits_to_keep=logits_to_keep.clone(), **more)


def mixes_rows(forward: Forward) -> Forward:
    """Make the logits depend on the number of rows, after the last layer."""

    def mixed(*args: Any, **more: Any) -> Any:
        output = forward(*args, **more)
        output.logits *= output.logits.shape[1]
        return output

    return mixed


def fails_on_other_rows(forward: Forward) -> Forward:
    """Raise if the number of logits is not the number wanted at first."""

    def checked(*args: Any, logits_to_keep: Tensor, **more: Any) -> Any:
        num_wanted = len(logits_to_keep)
        output = forward(*args, logits_to_keep=logits_to_keep, **more)
        if output.logits.shape[1] != num_wanted:
            raise RuntimeError("these are not the rows that were wanted")
        return output

    return checked


@pytest.mark.parametrize("spoil", [copies_wanted_rows_early, mixes_rows, fails_on_other_rows])
def test_a_model_that_evictions_disturb_is_found(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Forward], Forward]
) -> None:
    engine = make_engine("llama")
    assert rows_can_be_evicted(engine)
    model = engine._runner._model
    monkeypatch.setattr(model, "forward", spoil(model.forward))
    assert not rows_can_be_evicted(engine)


def test_layers_that_cannot_compact_rows_are_not_tried(make_engine: MakeEngine) -> None:
    assert not rows_can_be_evicted(make_engine("llama", optimize=False))


def test_without_kv_blocks_for_the_trial_only_whole_steps_are_evicted(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", kv_cache_bytes=5_000)
    assert engine.info.num_blocks < 6
    assert engine.info.step_eviction is StepEviction.STEPS
