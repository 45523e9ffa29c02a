"""The cost of idle requests: the bulk requests exist, and none of them runs in a measured step."""

import pytest

from bench.engines.idle_cost import IdleCostBench
from tests.loadtest.modeled_stepper import ModeledStepper


@pytest.mark.parametrize(("kind", "resident"), [("paused", 30), ("waiting", 0)])
def test_bulk_is_held_and_sits_out_every_measured_step(kind: str, resident: int) -> None:
    stepper = ModeledStepper(num_blocks=256, max_step_tokens=512)
    cost = IdleCostBench(stepper, 30, kind).measure(steps=5)
    assert (cost.idle, cost.resident) == (30, resident)
    assert [len(part) for part in (cost.times.plan, cost.times.engine, cost.times.apply)] == [5, 5, 5]
    assert len(cost.times.steps) == 5
    assert "batch.py" in cost.profile and "/" not in cost.profile.split("batch.py")[0][-1:]
    assert stepper.engine.num_used_blocks == 0


def test_no_idle_requests_is_a_measurement_too() -> None:
    cost = IdleCostBench(ModeledStepper(), 0, "paused").measure(steps=2)
    assert (cost.idle, cost.resident) == (0, 0)


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="swapped"):
        IdleCostBench(ModeledStepper(), 1, "swapped")
