"""An engine as a measurement drives it: one blocking step after another, with greedy sequences of a given length."""

from typing import Protocol

from engine.interface import EngineInfo, SamplingParams, StepPlan, StepResult


class Stepper(Protocol):
    """An engine that blocks while it steps."""

    @property
    def info(self) -> EngineInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...


def greedy(max_tokens: int) -> SamplingParams:
    """Return sampling that takes the likeliest token each time, and never ends before `max_tokens`."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
