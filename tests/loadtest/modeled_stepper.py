"""A modeled engine stepped in the caller's thread, for tests of code that drives an engine's interface."""

import asyncio
from typing import Any

from engine.interface import EngineInfo, StepPlan, StepResult
from engine.modeled.engine import ModeledEngine
from engine.step_time.cost import StepCost


class ModeledStepper:
    """Keeps the plans it was given. Each step takes no time at all."""

    def __init__(self, cost: StepCost | None = None, decode_cost: StepCost | None = None, **changes: Any) -> None:
        values: dict[str, Any] = {
            "max_model_len": 128,
            "vocab_size": 512,
            "block_size": 16,
            "num_blocks": 64,
            "max_step_tokens": 64,
            **changes,
        }
        info = EngineInfo("model", **values)
        self.engine = ModeledEngine(info, lambda seconds: asyncio.sleep(0), cost=cost, decode_cost=decode_cost)
        self.plans: list[StepPlan] = []

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.engine.submit(plan)
        return asyncio.run(self.engine.collect())

    def close(self) -> None:
        """There is nothing to release."""
