"""Steps an engine and evicts sequences at the layers that a test names, without a clock and without threads."""

import random
from collections.abc import Callable, Mapping

from torch import Tensor

from engine.interface import EngineInfo, StepEviction, StepPlan, StepResult
from engine.native.execution.torch_engine import TorchEngine

Evictions = Mapping[int, set[str]]  # by layer: the sequences to evict when the step reaches it
Choose = Callable[[StepPlan], Evictions]


class Evictor:
    """A stepper around `engine`, whose layers it hooks into for good. It checks each result against its requests."""

    def __init__(self, engine: TorchEngine, choose: Choose) -> None:
        self.engine = engine
        self.evicted: list[tuple[str, ...]] = []  # by step
        self.num_layers: list[int] = []  # layers that each step has entered
        self._choose = choose
        self._step_id = 0
        self._evictions: Evictions = {}
        self._enter = engine._runner.attention.enter_layer
        engine._runner.attention.enter_layer = self._enter_layer  # type: ignore[method-assign]

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def compile_grammar(self, grammar: str) -> object:
        return self.engine.compile_grammar(grammar)

    def step(self, plan: StepPlan) -> StepResult:
        before = {run.seq_id: self._num_computed(run.seq_id) for run in plan.run}
        reset = {p.seq_id for p in plan.preempt}
        self._step_id, self._evictions = plan.step_id, self._choose(plan)
        self.num_layers.append(0)
        result = self.engine.step(plan)
        self.evicted.append(result.evicted)
        requested = set().union(*self._evictions.values())
        ran = [run.seq_id for run in plan.run]
        assert set(result.evicted) <= requested.intersection(ran)
        if self.info.step_eviction is StepEviction.STEPS and result.evicted:
            assert list(result.evicted) == ran
        outputs = {output.seq_id: output for output in result.outputs}
        for seq_id in result.evicted:
            output = outputs[seq_id]
            assert (output.token_ids, output.finish_reason, output.logprobs, output.prompt_logprobs) == (
                (),
                None,
                (),
                (),
            )
            if seq_id not in reset:
                assert output.num_computed_tokens == before[seq_id] + output.num_cached_tokens
        assert result.free_blocks + self.engine.num_used_blocks == self.info.num_blocks
        return result

    def _num_computed(self, seq_id: str) -> int:
        table = self.engine._table
        return table[seq_id].num_computed_tokens if seq_id in table else 0

    def _enter_layer(self) -> Tensor | None:
        if self.num_layers:
            layer = self.num_layers[-1]
            self.num_layers[-1] += 1
            if layer in self._evictions:
                self.engine.evict(self._step_id, self._evictions[layer])
        return self._enter()


def never(plan: StepPlan) -> Evictions:
    """Evict nothing."""
    return {}


def at(layer: int, *seq_ids: str) -> Choose:
    """Evict these sequences at one layer of every step."""
    return lambda plan: {layer: set(seq_ids)}


def at_random(rng: random.Random, num_layers: int, probability: float = 0.6) -> Choose:
    """Evict some or all sequences of a step, at one layer or at two."""

    def choose(plan: StepPlan) -> Evictions:
        ids = [run.seq_id for run in plan.run]
        evictions: dict[int, set[str]] = {}
        while ids and rng.random() < probability and len(evictions) < num_layers:
            evictees = ids if rng.random() < 0.5 else rng.sample(ids, rng.randint(1, len(ids)))
            evictions[rng.randrange(num_layers)] = {*evictees, "unknown"}
        return evictions

    return choose
