"""Whether rows may leave is found out by trying: a model that they disturb lets whole steps go only."""

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


def may_leave(engine: TorchEngine) -> bool:
    return can_evict_rows(engine._runner._model, engine._runner, engine.info)


def test_a_common_model_is_not_disturbed(make_engine: MakeEngine) -> None:
    engine = make_engine("llama")
    assert may_leave(engine) and engine.info.step_eviction is StepEviction.ROWS


def looks_early(forward: Forward) -> Forward:
    """At which rows' logits are wanted."""
    return lambda *args, logits_to_keep, **more: forward(*args, logits_to_keep=logits_to_keep.clone(), **more)


def mixes_rows(forward: Forward) -> Forward:
    """Behind the last layer."""

    def mixed(*args: Any, **more: Any) -> Any:
        output = forward(*args, **more)
        output.logits *= output.logits.shape[1]
        return output

    return mixed


def fails(forward: Forward) -> Forward:
    def checked(*args: Any, logits_to_keep: Tensor, **more: Any) -> Any:
        num_wanted = len(logits_to_keep)
        output = forward(*args, logits_to_keep=logits_to_keep, **more)
        if output.logits.shape[1] != num_wanted:
            raise RuntimeError("these are not the rows that were wanted")
        return output

    return checked


@pytest.mark.parametrize("spoil", [looks_early, mixes_rows, fails])
def test_a_model_that_is_disturbed_is_found_out(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Forward], Forward]
) -> None:
    engine = make_engine("llama")
    model = engine._runner._model
    monkeypatch.setattr(model, "forward", spoil(model.forward))
    assert not may_leave(engine)


def test_layers_that_cannot_close_ranks_are_not_tried(make_engine: MakeEngine) -> None:
    assert not may_leave(make_engine("llama", optimize=False))


def test_without_room_for_the_trial_rows_do_not_leave(make_engine: MakeEngine) -> None:
    engine = make_engine("llama", kv_cache_bytes=5_000)
    assert engine.info.num_blocks < 6
    assert engine.info.step_eviction is StepEviction.STEPS
