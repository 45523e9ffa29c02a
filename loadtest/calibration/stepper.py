"""The interface through which a measurement drives an engine: one blocking step at a time.

Also holds sampling parameters for greedy sequences of a given length.
"""

from typing import Protocol

from engine.interface import EngineInfo, SamplingParams, StepPlan, StepResult


class Stepper(Protocol):
    """An engine whose `step` blocks until the step is done."""

    @property
    def info(self) -> EngineInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters for greedy sampling of exactly `max_tokens` tokens; an end-of-sequence token is ignored."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
