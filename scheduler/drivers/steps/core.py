"""The scheduler of our own engines, without I/O: it plans steps, applies their results, and says what to report.

`held` has the requests. Only `held`, `_planner` and this core write to their states. The core passes observations to
the SLA controller in `apply` and `review`. Knows tiers and tokens; does not know queues, the engine, clocks or metrics.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.interface import EngineInfo, SequenceOutput, StepEnd, StepPlan, StepResult
from engine.step_time.cost import StepWork
from engine.step_time.model import StepTimeModel
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.control.knobs import Decision
from scheduler.drivers.steps.engine_state import EngineState
from scheduler.drivers.steps.isolation import Isolation
from scheduler.drivers.steps.planner import Planner
from scheduler.drivers.steps.running_step import RunningStep
from scheduler.holdings.claims import claim_limits
from scheduler.holdings.holdings import Holdings
from scheduler.holdings.report import Report
from scheduler.holdings.status import CoreStatus
from scheduler.request import Request
from scheduler.request_state import RequestState, Status


class StepCore:
    """The scheduler of one worker with an engine. Implements `scheduler.worker.driver.WorkerCore`."""

    def __init__(
        self,
        tiers: TierSet,
        engine: EngineInfo,
        controller: SLAController,
        step_time: StepTimeModel | None = None,
        worker_id: str = "",
        draw: Callable[[], float] = lambda: 0.5,
    ) -> None:
        """`worker_id` is the name of the worker in receipts. `draw` returns a random number in [0, 1)."""
        self.held = Holdings(tiers, engine, controller, self._begin, self._drop, worker_id=worker_id)
        self.controller = controller
        self.step_time = step_time or StepTimeModel()
        self.running = RunningStep(engine.num_layers, draw)
        self._engine = engine
        self._states = self.held.table.states
        self._engine_state = EngineState(engine)
        self.isolation = Isolation(self.held.table)
        self.planner = Planner(
            self.held, engine, controller, self.step_time, self._engine_state, self.running, self.isolation
        )
        self._awaiting_grammar: dict[str, RequestState] = {}

    # -- readings ----------------------------------------------------------------------------------------------

    @property
    def kv_usage(self) -> float:
        return self._engine_state.kv_usage

    @property
    def is_busy(self) -> bool:
        """Whether there is a plan whose result has not been applied yet."""
        return self.running.is_any

    def status(self, now: float) -> CoreStatus:
        return replace(
            self.held.status(self.step_time, now),
            kv_usage=self.kv_usage,
            kv_reserve_blocks=self._kv_reserve_blocks,
            interactive_s=self.running.interactive_s,
            preemptions=self.planner.preemptions,
            recomputed_tokens=self.planner.recomputed_tokens,
            num_suspensions=self.running.num_suspensions,
            wasted_s=self.running.wasted_s,
            slowdowns=self.running.slowdown.readings(),
        )

    def explain(self, now: float) -> dict[str, Any]:
        return {**self.controller.explain(now), "kv_reserve_blocks": self._kv_reserve_blocks}

    @property
    def _kv_reserve_blocks(self) -> int:
        return self._engine_state.view().reserve_blocks(self.controller.kv_reserve)

    # -- requests ----------------------------------------------------------------------------------------------

    def claim_limits(self, now: float) -> dict[str, int]:
        ending = self.running.ending(self._states, self._engine.max_model_len)
        held_back = Counter(state.tier.name for state in self.isolation.held_back().values())
        return claim_limits(self.held.tiers, self.held.table, self.planner.budgets(now), ending, held_back)

    def _begin(self, state: RequestState) -> None:
        state.bulk_seen_s = self.running.bulk_total_s
        self.running.open_account(state)
        self.running.slowdown.note_arrival(state, beside_bulk=self.running.has_bulk)
        state.found_step_s = self.running.step_s if self.is_busy else 0.0
        self.isolation.add(state)
        if state.request.sampling.grammar is not None:
            state.awaits_grammar = True
            self._awaiting_grammar[state.id] = state

    def _drop(self, state: RequestState) -> None:
        """Make the next plan abort the sequence of a request."""
        self._awaiting_grammar.pop(state.id, None)
        if state.status is not Status.WAITING:
            self._engine_state.abandon(state)

    def next_to_compile(self) -> Request | None:
        """Return the request whose grammar should be compiled next: the most urgent one of the highest priority.

        Grammars of suspects that may not run yet are left out, because compiling may be what kills the worker.
        """
        states: Iterable[RequestState] = self._awaiting_grammar.values()
        if self.isolation.has_suspects:
            states = [state for state in states if self.isolation.may_compile(state)]
        state = min(states, key=lambda s: (-s.priority, s.edf_key), default=None)
        return None if state is None else state.request

    def note_compiled(self, request_id: str, compiled_grammar: object) -> None:
        """Let a request start whose grammar is compiled. Do nothing if the request is not held any more."""
        state = self._awaiting_grammar.pop(request_id, None)
        if state is not None:
            state.compiled_grammar, state.awaits_grammar = compiled_grammar, False
            self.running.open_account(state)  # until now, it was not bulk that it waited for

    def refuse_grammar(self, request_id: str, reason: str) -> None:
        """Refuse a request whose grammar does not compile. Do nothing if the request is not held any more."""
        state = self._awaiting_grammar.pop(request_id, None)
        if state is not None:
            self.held.table.remove(state)
            self.held.note_refused(state, reason)

    # -- one step ----------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Return the plan of the next step.

        The request states are already updated, so the caller must execute the plan.
        """
        return self.planner.plan(now)

    def apply(self, result: StepResult, now: float, overhead_s: float = 0.0) -> Report:
        """Apply the result of a step, and return the report on it.

        `overhead_s` is the time that the host needed for the step in addition to the engine's time.
        """
        report = Report()
        self._learn(result, overhead_s, report, now)
        if result.end is StepEnd.DROPPED:
            self.held.table.note_dropped([output.seq_id for output in result.outputs])
        self._apply_outputs(result, now, report)
        self.held.inputs.tell_step(report, result.elapsed_s, overhead_s, now)
        return report

    def _apply_outputs(self, result: StepResult, now: float, report: Report) -> None:
        """Apply the outputs and failures of a step to the request states.

        The results of abandoned sequences are ignored. One that has ended is removed from the sequences to abort.
        """
        engine = self._engine_state
        for seq_id, num_shared in result.shared_blocks:
            if seq_id in self._states and not engine.is_abandoned(seq_id):
                self._states[seq_id].num_shared_blocks = num_shared
        for output in result.outputs:
            if not engine.is_abandoned(output.seq_id):
                self._add_output(self._states[output.seq_id], output, now, report)
            elif output.finish_reason is not None:
                engine.forget_abandoned(output.seq_id)
        for failure in result.failures:
            if engine.is_abandoned(failure.seq_id):
                engine.forget_abandoned(failure.seq_id)
            else:
                self.held.fail(self._states[failure.seq_id], failure.reason, now, report)

    def _add_output(self, state: RequestState, output: SequenceOutput, now: float, report: Report) -> None:
        awaited = state.awaits_first_token
        self.held.outputs.add(state, output, self.running.bulk_total_s, now, report)
        if awaited and not state.awaits_first_token:
            self.running.slowdown.note_first_token(state, now)

    def observe_step_time(self, work: StepWork, elapsed_s: float) -> None:
        """Learn the time of a step that the core did not plan, such as a warm-up step at the start."""
        self.step_time.observe(work, elapsed_s)
        self.running.accounts.step_time.observe(work, elapsed_s)

    def _learn(self, result: StepResult, overhead_s: float, report: Report, now: float) -> None:
        self._engine_state.update(result)
        self.running.end(result, report, overhead_s, self.held.table.interactive(), now)
        if report.work is not None:
            report.predicted_s = self.step_time.predict(report.work)
            self.step_time.observe(report.work, report.elapsed_s)
        self.held.add_used(report.used_s)
        for use in report.drafts:
            self.planner.speculation.note(use.state, use.num_drafted, use.num_accepted)

    # -- twice a second ----------------------------------------------------------------------------------------

    def review(self, depths: Mapping[str, int], now: float) -> list[Decision]:
        return self.held.review(depths, self.kv_usage, self.step_time, now)
