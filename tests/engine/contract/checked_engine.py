"""An engine that a test steps, checked after every step: law 2, and what every result must have."""

import asyncio
from collections import deque
from dataclasses import replace

from engine.interface import Engine, EngineInfo, PreemptionMode, Run, StepEnd, StepPlan, StepResult, blocks_for
from tests.engine.drive import make_new


class CheckedEngine:
    """An engine with blocking steps. It knows the sequences only by plans and results.

    Step ids of the plans are replaced by new ones, so that tests may begin at 0.
    """

    def __init__(self, engine: Engine, runner: asyncio.Runner) -> None:
        self.engine = engine
        self._runner = runner
        self._num_steps = 0
        self._in_flight: deque[StepPlan] = deque()
        self._num_computed: dict[str, int] = {}  # of each sequence that is alive
        self._swapped: set[str] = set()
        self._shared: dict[str, int] = {}  # blocks that other sequences hold as well
        self.num_suspended = 0  # steps

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def step(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def suspended_step(self, plan: StepPlan) -> StepResult:
        """Step `plan` in two steps: while the first is suspended, as far as the engine can, the second runs."""
        first, rest = plan.run[::2], plan.run[1::2]
        results = [self._raw(replace(plan, run=first), suspends=True)]
        if results[-1].end is StepEnd.SUSPENDED:
            self.num_suspended += 1
            proceed_s = 1e-6  # first for one layer
            while (suspended := results[-1]).end is StepEnd.SUSPENDED:
                assert not suspended.outputs
                results += [self._raw(StepPlan(0, run=rest))] if rest else []
                rest = ()
                results.append(self._raw(StepPlan(suspended.step_id, proceed_s=proceed_s)))
                proceed_s = 100.0
        results += [self._raw(StepPlan(0, run=rest))] if rest else []
        outputs = [output for result in results for output in result.outputs]
        failures = tuple(failure for result in results for failure in result.failures)
        shared = tuple(change for result in results for change in result.shared_blocks)
        result = replace(results[-1], outputs=tuple(outputs), failures=failures, shared_blocks=shared)
        self._begin(plan)
        self._end(result)
        self._check_blocks(result)
        return result

    def _raw(self, plan: StepPlan, *, suspends: bool = False) -> StepResult:
        async def step() -> StepResult:
            self.engine.submit(plan)
            if suspends:
                self.engine.suspend()
            return await self.engine.collect()

        if not plan.is_of_suspended:
            self._num_steps += 1
            plan = replace(plan, step_id=self._num_steps)
        return self._runner.run(step())

    def run(self, *runs: tuple[str, int], **plan: object) -> StepResult:
        """Step a plan that runs these (sequence, number of tokens)."""
        return self.step(StepPlan(0, run=tuple(Run(*run) for run in runs), **plan))  # type: ignore[arg-type]

    def submit(self, plan: StepPlan) -> None:
        async def submit() -> None:
            self.engine.submit(plan)

        self._num_steps += 1
        plan = replace(plan, step_id=self._num_steps)
        self._runner.run(submit())
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        """Return the result of the oldest step. A step that the engine refuses is none."""
        plan = self._in_flight.popleft()
        result = self._runner.run(self.engine.collect())  # type: ignore[arg-type]
        assert result.step_id == plan.step_id and result.elapsed_s >= 0
        self._begin(plan)
        reported = [output.seq_id for output in result.outputs] + [failure.seq_id for failure in result.failures]
        runs = [run.seq_id for run in plan.run if not plan.ahead or run.seq_id in self._num_computed]
        assert sorted(reported) == sorted(runs), "each run has an output or a failure"
        self._end(result)
        if not self._in_flight:
            self._check_blocks(result)
        return result

    def compile_grammar(self, grammar: str) -> object:
        return self._runner.run(self.engine.compile_grammar(grammar))  # type: ignore[arg-type]

    def occupy(self, num_blocks: int) -> None:
        """Let new sequences, which sample no token, hold this number of blocks."""
        info = self.info
        for first in range(0, num_blocks, info.max_model_len // info.block_size):
            size = min(num_blocks - first, info.max_model_len // info.block_size) * info.block_size
            new = make_new(f"occupant-{first}", [1] * (size - 1), prompt_logprobs=0)  # so it takes no cached blocks
            self.run((new.seq_id, size - 2), start=(new,))

    def abort_all(self) -> None:
        """Leave the engine as a test must find it."""
        while self._in_flight:
            self.collect()
        result = self.step(StepPlan(0, abort=tuple(self._num_computed)))
        assert result.free_blocks == self.info.num_blocks

    def _begin(self, plan: StepPlan) -> None:
        for seq_id in plan.abort:
            self._forget(seq_id)
        for preempt in plan.preempt:
            if preempt.mode is PreemptionMode.RECOMPUTE:
                self._num_computed[preempt.seq_id] = 0
            elif preempt.mode is PreemptionMode.SWAP:
                self._swapped.add(preempt.seq_id)
        self._swapped.difference_update(plan.resume)
        self._num_computed |= {new.seq_id: 0 for new in plan.start}
        self._shared |= {new.seq_id: 0 for new in plan.start}

    def _end(self, result: StepResult) -> None:
        self._shared |= dict(result.shared_blocks)
        for output in result.outputs:
            self._num_computed[output.seq_id] = output.num_computed_tokens
            if output.finish_reason is not None:
                self._forget(output.seq_id)
        for failure in result.failures:
            self._forget(failure.seq_id)

    def _forget(self, seq_id: str) -> None:
        del self._num_computed[seq_id]
        self._swapped.discard(seq_id)

    def _check_blocks(self, result: StepResult) -> None:
        """Used blocks are those of the computed tokens; a block that several sequences hold counts once."""
        blocks = {seq_id: blocks_for(n, self.info.block_size) for seq_id, n in self._num_computed.items()}
        held = {seq_id: number for seq_id, number in blocks.items() if seq_id not in self._swapped}
        shared = sum(self._shared[seq_id] for seq_id in held)
        used = self.info.num_blocks - result.free_blocks
        assert sum(held.values()) - shared <= used <= sum(held.values()) - shared // 2, "free + used = total"
        assert self.info.num_swap_blocks - result.free_swap_blocks == sum(blocks[s] for s in self._swapped)
