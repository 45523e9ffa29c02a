"""A modeled engine whose steps are recorded.

It also adds a time that the modeled engine leaves out: that of the host between two steps, while the device is idle.
"""

from collections.abc import Awaitable, Callable, Collection

from engine.interface import Engine, EngineInfo, PreemptionMode, StepPlan, StepResult
from loadtest.simulation.observation import EngineRecord


class WatchedEngine:
    """An implementation of `Engine` that wraps another engine. `sleep` waits on the virtual clock."""

    def __init__(
        self,
        engine: Engine,
        sleep: Callable[[float], Awaitable[None]],
        host_overhead_s: float,
        record: EngineRecord,
    ) -> None:
        self._engine = engine
        self._sleep = sleep
        self._host_overhead_s = host_overhead_s
        self._record = record
        self._computed: dict[str, int] = {}  # number of tokens with KV, by sequence
        self._submitted: StepPlan | None = None

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def compile_grammar(self, grammar: str) -> object:
        return await self._engine.compile_grammar(grammar)

    def submit(self, plan: StepPlan) -> None:
        self._engine.submit(plan)
        self._submitted = plan
        for seq_id in plan.abort:
            self._computed.pop(seq_id, None)
        for preempt in plan.preempt:
            if preempt.mode is PreemptionMode.RECOMPUTE:
                self._record.lost_tokens += self._computed.pop(preempt.seq_id, 0)

    async def collect(self) -> StepResult:
        result = await self._engine.collect()
        if self._submitted is not None and self._submitted.run:
            self._record_step(self._submitted, result)
            if self._host_overhead_s:
                await self._sleep(self._host_overhead_s)
        return result

    def check_alive(self) -> None:
        self._engine.check_alive()

    def evict(self, seq_ids: Collection[str]) -> None:
        self._engine.evict(seq_ids)

    def close(self) -> None:
        self._engine.close()

    def _record_step(self, plan: StepPlan, result: StepResult) -> None:
        record, computed = self._record, self._computed
        record.steps += 1
        record.busy_s += result.elapsed_s
        record.rows += len(plan.run)
        for output in result.outputs:
            if output.finish_reason is None:
                computed[output.seq_id] = output.num_computed_tokens
            else:
                computed.pop(output.seq_id, None)
        record.planned_tokens += plan.num_tokens
        if result.evicted:
            self._note_evicted(plan, result)

    def _note_evicted(self, plan: StepPlan, result: StepResult) -> None:
        """Record the evicted rows, and count their share of the step's time as wasted.

        Their share of the time is their share of the step's tokens. The wasted time is an upper bound, because the
        evicted rows left before the end of the step.
        """
        evicted = set(result.evicted)
        evicted_tokens = sum(run.num_tokens for run in plan.run if run.seq_id in evicted)
        self._record.shed_steps += 1
        self._record.shed_rows += len(evicted)
        self._record.wasted_s += result.elapsed_s * evicted_tokens / plan.num_tokens
