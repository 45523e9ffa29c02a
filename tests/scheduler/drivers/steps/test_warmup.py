"""The synthetic steps at start fit any engine, train the step-time model and leave no sequence behind."""

import pytest

from engine.interface import EngineInfo
from engine.modeled.engine import ModeledEngine
from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from scheduler.drivers.steps.warmup import warm_up
from scheduler.virtual_time import VirtualClock
from tests.scheduler.builders import make_info
from tests.scheduler.world import run_bounded

SLOW = StepCost(step_s=0.05, prefill_token_s=0.002, attend_s=0.0, context_token_s=0.0, decode_s=0.004)


def warmed(info: EngineInfo, budget_s: float) -> tuple[ModeledEngine, StepTimeModel, float]:
    async def story() -> tuple[ModeledEngine, StepTimeModel, float]:
        clock = VirtualClock()
        engine = ModeledEngine(info, clock.sleep, SLOW, noise=0.0, prefix_cache=True)
        model = StepTimeModel()
        await warm_up(engine, model.observe, clock, budget_s)
        return engine, model, clock.now()

    return run_bounded(story())


def test_warm_up_trains_the_step_time_model() -> None:
    _, model, _ = warmed(make_info(), budget_s=60.0)
    assert model.cost().prefill(64, 0) == pytest.approx(SLOW.prefill(64, 0), rel=0.15)
    assert model.cost().step_s == pytest.approx(SLOW.step_s, rel=0.25)


def test_warm_up_leaves_no_sequence_behind_and_keeps_to_its_time() -> None:
    engine, _, took_s = warmed(make_info(), budget_s=0.5)
    assert engine.num_used_blocks == 0
    assert took_s < 1.0


@pytest.mark.parametrize("change", [{"max_step_tokens": 16}, {"max_model_len": 64}, {"num_blocks": 4}])
def test_warm_up_fits_small_engines(change: dict[str, int]) -> None:
    engine, _, _ = warmed(make_info(**change), budget_s=60.0)
    assert engine.num_used_blocks == 0
