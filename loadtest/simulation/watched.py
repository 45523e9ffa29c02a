"""The simulated worker's engine and metrics, which write what happens into the observation of the run.

The engine also adds a time that the modeled engine leaves out: that of the host between two steps, while the device is
idle. Nothing scrapes a simulated worker.
"""

from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry

from engine.interface import Engine, EngineInfo, PreemptionMode, StepEnd, StepPlan, StepResult
from loadtest.simulation.observation import EngineRecord, MovedKnob, Observation
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.control.knobs import Decision
from scheduler.holdings.report import Report
from scheduler.holdings.status import CoreStatus
from scheduler.worker.metrics import SchedulerMetrics


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
        self._in_flight: deque[StepPlan] = deque()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def compile_grammar(self, grammar: str) -> object:
        return await self._engine.compile_grammar(grammar)

    def submit(self, plan: StepPlan) -> None:
        self._engine.submit(plan)
        self._in_flight.append(plan)
        for seq_id in plan.abort:
            self._computed.pop(seq_id, None)
        for preempt in plan.preempt:
            if preempt.mode is PreemptionMode.RECOMPUTE:
                self._record.lost_tokens += self._computed.pop(preempt.seq_id, 0)

    async def collect(self) -> StepResult:
        result = await self._engine.collect()
        plan = self._in_flight.popleft()
        if plan.run or plan.is_of_suspended:
            self._record_step(plan, result)
            if self._host_overhead_s and not self._in_flight:  # else the device is not idle
                await self._sleep(self._host_overhead_s)
        return result

    def check_alive(self) -> None:
        self._engine.check_alive()

    def suspend(self) -> None:
        self._engine.suspend()

    def close(self) -> None:
        self._engine.close()

    def _record_step(self, plan: StepPlan, result: StepResult) -> None:
        record, computed = self._record, self._computed
        record.busy_s += result.elapsed_s
        record.suspensions += result.end is StepEnd.SUSPENDED
        record.dropped_steps += plan.drop
        record.steps += bool(plan.run)
        record.rows += len(plan.run)
        for output in result.outputs:
            if output.finish_reason is None:
                computed[output.seq_id] = output.num_computed_tokens
            else:
                computed.pop(output.seq_id, None)
        record.planned_tokens += plan.num_tokens


class WatchedMetrics(SchedulerMetrics):
    """The metrics of one simulated worker.

    `begins_s` is the time on the clock at which the load begins.
    """

    def __init__(self, tiers: TierSet, observation: Observation, worker: int, clock: Clock, begins_s: float) -> None:
        super().__init__(CollectorRegistry(), tiers)
        self._observation = observation
        self._worker = worker
        self._clock = clock
        self._begins_s = begins_s

    def record_step(self, elapsed_s: float, ran: Mapping[str, int]) -> None:
        pass

    def record_report(self, report: Report) -> None:
        for sample in report.samples:
            if sample.kind == "queue":
                self._observation.queue_s.setdefault(sample.tier, array("d")).append(sample.seconds)

    def record_cancelled(self, tier: str) -> None:
        pass

    def record_decisions(self, decisions: Iterable[Decision]) -> None:
        at_s = self._clock.now() - self._begins_s
        self._observation.moves += [MovedKnob(at_s, self._worker, d) for d in decisions]

    def record_state(self, status: CoreStatus, queued: Mapping[str, int]) -> None:
        pass
