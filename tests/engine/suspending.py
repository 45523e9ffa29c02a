"""Steps an engine, and suspends its steps at layers drawn at random, without a clock and without threads."""

import random
from dataclasses import replace

from engine.interface import EngineInfo, Run, StepEnd, StepPlan, StepResult
from engine.native.execution.torch_engine import TorchEngine
from engine.suspension import StepDropped


class Suspending:
    """A stepper around `engine`, and its `Suspender`.

    A plan becomes several steps. The first has some of the plan's runs; while it is suspended, others have the rest.
    Now and then, the suspended step is dropped. The results become one, as if there had been one step. With a
    `probability` of 0, plans stay as they are.
    """

    def __init__(self, engine: TorchEngine, rng: random.Random, probability: float = 0.3) -> None:
        self.engine = engine
        self.num_suspended = 0  # suspensions
        self.num_beside = 0  # steps that ran while another one was suspended
        self.dropped: list[tuple[str, ...]] = []  # the sequences of each dropped step
        self._rng = rng
        self._probability = probability
        self._next_step_id = 0
        self._outer: StepPlan | None = None  # the plan of the step that may be suspended now
        self._rest: list[Run] = []  # runs of the plan that no step has computed yet
        self._results: list[StepResult] = []
        engine.suspend_by(self)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def compile_grammar(self, grammar: str) -> object:
        return self.engine.compile_grammar(grammar)

    def step(self, plan: StepPlan) -> StepResult:
        first = [run for run in plan.run if self._rng.random() < 0.5 or not self._probability] or list(plan.run)
        self._rest = [run for run in plan.run if run not in first]
        self._results = []
        self._compute(replace(plan, run=tuple(first)))
        while self._rest:
            self._compute(StepPlan(0, run=tuple(self._take_rest())))
        return self._merged(plan)

    def is_due(self) -> bool:
        assert self._outer is not None, "a step is not suspended while another one is"
        return self._rng.random() < self._probability

    def wait(self, suspended: StepResult) -> None:
        """Run steps beside the suspended one, one after the other; then let it go on, or drop it."""
        outer, self._outer = self._outer, None
        assert outer is not None
        assert (suspended.end, suspended.outputs, suspended.step_id) == (StepEnd.SUSPENDED, (), outer.step_id)
        assert suspended.free_blocks + self.engine.num_used_blocks == self.info.num_blocks
        self.num_suspended += 1
        while self._rest and self._rng.random() < 0.7:
            self.num_beside += 1
            self._results.append(self.engine.step(self._numbered(StepPlan(0, run=tuple(self._take_rest())))))
        self._outer = outer
        if self._rng.random() < 0.15:
            self.dropped.append(tuple(run.seq_id for run in outer.run))
            raise StepDropped

    def _take_rest(self) -> list[Run]:
        taken = self._rng.sample(self._rest, self._rng.randint(1, len(self._rest)))
        self._rest = [run for run in self._rest if run not in taken]
        return taken

    def _compute(self, plan: StepPlan) -> None:
        self._outer = self._numbered(plan)
        result = self.engine.step(self._outer)
        if result.end is StepEnd.DROPPED:
            assert [output.seq_id for output in result.outputs] == list(self.dropped[-1])
            assert not any(output.token_ids or output.finish_reason for output in result.outputs)
        self._results.append(result)

    def _numbered(self, plan: StepPlan) -> StepPlan:
        self._next_step_id += 1
        return replace(plan, step_id=self._next_step_id)

    def _merged(self, plan: StepPlan) -> StepResult:
        """Return one result of all steps, with the outputs in the order of the plan."""
        outputs = {output.seq_id: output for result in self._results for output in result.outputs}
        failures = tuple(failure for result in self._results for failure in result.failures)
        shared = tuple(change for result in self._results for change in result.shared_blocks)
        assert outputs.keys() | {failure.seq_id for failure in failures} == {run.seq_id for run in plan.run}
        assert self._results[-1].free_blocks + self.engine.num_used_blocks == self.info.num_blocks
        ordered = tuple(outputs[run.seq_id] for run in plan.run if run.seq_id in outputs)
        return replace(
            self._results[-1], step_id=plan.step_id, outputs=ordered, failures=failures, shared_blocks=shared
        )
