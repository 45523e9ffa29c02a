"""The driver that an engine's own speed is measured with."""

import pytest

from bench.engines.systems.offline import GenerationFailed, generate_offline
from engine.interface import SequenceFailure, StepPlan, StepResult
from tests.loadtest.modeled_stepper import ModeledStepper


def test_everybody_gets_exactly_as_many_tokens_as_asked_for() -> None:
    stepper = ModeledStepper()
    prompts = [[20 + i] * (5 + 7 * i) for i in range(5)]
    wanted = [1, 9, 3, 1, 20]
    outputs = generate_offline(stepper, prompts, wanted)
    assert [len(tokens) for tokens in outputs] == wanted
    assert stepper.engine.num_used_blocks == 0


def test_decodes_go_first_and_prompts_fill_what_is_left_of_a_step() -> None:
    stepper = ModeledStepper(max_step_tokens=16)
    generate_offline(stepper, [[20] * 10, [21] * 30], [4, 1])
    runs = [[(run.seq_id, run.num_tokens) for run in plan.run] for plan in stepper.plans[:3]]
    first, second = "offline-0", "offline-1"
    assert runs == [[(first, 10), (second, 6)], [(first, 1), (second, 15)], [(first, 1), (second, 9)]]


def test_a_sequence_that_breaks_ends_the_run_with_its_reason() -> None:
    class Broken(ModeledStepper):
        def step(self, plan: StepPlan) -> StepResult:
            return StepResult(plan.step_id, failures=(SequenceFailure("offline-0", "no logits"),))

    with pytest.raises(GenerationFailed, match="offline-0: no logits"):
        generate_offline(Broken(), [[20]], [2])
