"""The scheduler without I/O: it accepts requests, plans steps, applies their results, and says what to report.

`SchedulerCore` owns every `RequestState`. Only its own parts (`table`, `_planner`, `_outputs`) write to the states. The
core passes observations to the SLA controller in `apply` and `review`. Knows tiers and tokens; does not know queues,
the engine, clocks or metrics. `scheduler.worker` and the loop connect the core with them.

No request gets lost. At every instant, accepted = finished + failed + cancelled + released + held + refused but not
reported yet.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.interface import EngineInfo, StepPlan, StepResult
from engine.step_time.cost import StepWork
from engine.step_time.model import StepTimeModel
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.control.knobs import Decision
from scheduler.drivers.steps.engine_state import EngineState
from scheduler.drivers.steps.isolation import Isolation
from scheduler.drivers.steps.planner import Planner
from scheduler.drivers.steps.running_step import RunningStep
from scheduler.holdings.claims import reason_against, reason_to_give_up, restored_tokens
from scheduler.holdings.controller_inputs import ControllerInputs
from scheduler.holdings.outputs import OutputHandler
from scheduler.holdings.report import Report
from scheduler.holdings.request_table import RequestTable
from scheduler.holdings.status import CoreStatus, count_by_status
from scheduler.request import WORKER_DIED, Claimed, Lease, Request
from scheduler.request_state import RequestState, Status


class SchedulerCore:
    """The scheduler of one worker. It holds the state of every request that the worker has claimed."""

    def __init__(
        self,
        tiers: TierSet,
        engine: EngineInfo,
        controller: SLAController,
        step_time: StepTimeModel | None = None,
        worker_id: str = "",
    ) -> None:
        """`worker_id` is the name of the worker in receipts."""
        self.tiers = tiers.by_priority
        self._tier_of = tiers.tiers
        self._engine = engine
        self.controller = controller
        self.step_time = step_time or StepTimeModel()
        self.running = RunningStep(engine.num_layers)
        self.table = RequestTable(self.tiers)
        self._states = self.table.states
        self._engine_state = EngineState(engine)
        self._isolation = Isolation(self.table)
        self._planner = Planner(
            engine, controller, self.step_time, self.table, self._engine_state, self.running, self._isolation
        )
        self._inputs = ControllerInputs(controller, self.table, engine)
        self._refused: list[tuple[RequestState, str, str]] = []  # with the reason, and its code
        self._awaiting_grammar: dict[str, RequestState] = {}
        self.used_s: defaultdict[str, float] = defaultdict(float)  # engine time since the start, by tier
        self.interactive_s = 0.0  # engine time since the start that interactive tiers take from urgent bulk
        self._restored_tokens: Counter[str] = Counter()  # output tokens taken from checkpoints, by tier
        self.counts: Counter[str] = Counter()  # numbers of requests: accepted, finished, failed, cancelled, released
        self._outputs = OutputHandler(self.table, self.counts, worker_id)

    # -- readings ----------------------------------------------------------------------------------------------

    @property
    def states(self) -> Iterable[RequestState]:
        """The states of all requests that are held. Only the core may change them."""
        return self._states.values()

    @property
    def preemptions(self) -> Counter[tuple[str, str]]:
        """The number of preemptions since the start, by (tier, mode)."""
        return self._planner.preemptions

    @property
    def num_held(self) -> int:
        return len(self.table)

    @property
    def num_interactive(self) -> int:
        return sum(self.table.count(tier.name) for tier in self.tiers if tier.is_interactive)

    def count(self, tier: str) -> int:
        """Return how many requests of a tier are held."""
        return self.table.count(tier)

    @property
    def kv_usage(self) -> float:
        return self._engine_state.kv_usage

    @property
    def is_step_in_flight(self) -> bool:
        """Whether there is a plan whose result has not been applied yet."""
        return self._engine_state.is_step_in_flight

    @property
    def running_step_s(self) -> float:
        """The predicted length in seconds of the step that runs; 0 if no step runs."""
        return self.running.step_s

    @property
    def idle_until_s(self) -> float:
        """The time at which the first batching delay ends, if the newest plan was empty; otherwise inf."""
        return self._planner.idle_until_s

    def status(self, now: float) -> CoreStatus:
        """Return a snapshot of the scheduler. It looks at all states, so call it twice a second, not in every step."""
        return CoreStatus(
            kv_usage=self.kv_usage,
            kv_reserve_blocks=self.controller.kv_reserve_blocks,
            step_cost=self.step_time.cost(),
            knows_step_times=self.step_time.is_warm,
            step_time_error=self.step_time.mean_absolute_error,
            held={tier.name: count_by_status(self.table.of_tier(tier.name)) for tier in self.tiers},
            outputs=self.controller.outputs(now),
            used_s=self.used_s,
            interactive_s=self.interactive_s,
            preemptions=self._planner.preemptions,
            recomputed_tokens=self._planner.recomputed_tokens,
            restored_tokens=self._restored_tokens,
            num_step_evictions=self.running.waste_budget.num_evictions,
            wasted_s=self.running.waste_budget.wasted_s,
            missing_deadlines=self._inputs.missing_deadlines,
            safety=self.step_time.safety,
            decode_cost=self.step_time.cost(mixed=False),
        )

    def explain(self, now: float) -> dict[str, Any]:
        """Return the controller's state and its newest decisions with their reasons, as plain data."""
        return self.controller.explain(now)

    # -- requests ----------------------------------------------------------------------------------------------

    def claim_limits(self, now: float) -> dict[str, int]:
        """Return how many more requests of each tier to claim from the queue. The highest tier comes first."""
        return self._planner.claim_limits(self.tiers, now)

    def accept(self, claimed: Sequence[Claimed], now: float, wall_ms: int) -> None:
        """Accept claimed requests. `now` and `wall_ms` are the same instant on the monotonic and the wall clock.

        A request that is held already only gets the newer fence. A request that the engine can never serve is refused:
        `refuse` reports it.
        """
        for item in claimed:
            self._inputs.note_claimed(item.request.tier)
            held = self._states.get(item.request.id)
            if held is not None:  # the lease expired, and this worker claimed the request again: use the newer lease
                held.fence = item.fence
                continue
            state = self._new_state(item, now, wall_ms)
            self.counts["accepted"] += 1
            if reason := reason_to_give_up(item, state.tier.retry.max_attempts):
                self._refused.append((state, reason, WORKER_DIED))
                continue
            if reason := reason_against(item.request, self._engine):
                self._refused.append((state, reason, ""))
                continue
            self.table.update(state)
            self._isolation.add(state)
            self._restored_tokens[state.tier.name] += state.num_restored
            if state.awaits_grammar:
                self._awaiting_grammar[state.id] = state

    def _new_state(self, item: Claimed, now: float, wall_ms: int) -> RequestState:
        request, output = item.request, restored_tokens(item, self._engine)
        return RequestState(
            request=request,
            tier=self._tier_of.get(request.tier, self.tiers[-1]),  # its tier may have been removed just now
            fence=item.fence,
            arrived_s=now - max(0, wall_ms - request.arrival_ms) / 1000,
            claimed_s=now,
            bulk_seen_s=self.running.bulk_total_s,
            found_step_s=self.running.step_s if self.is_step_in_flight else 0.0,
            attempt=item.attempt,
            output_token_ids=list(output),
            num_restored=len(output),
            awaits_grammar=request.sampling.grammar is not None,
        )

    def can_continue(self, state: RequestState) -> bool:
        """Return whether another worker can continue the request from its output tokens."""
        return state.can_continue

    def next_to_compile(self) -> Request | None:
        """Return the request whose grammar should be compiled next: the most urgent one of the highest priority.

        Grammars of suspects that may not run yet are left out, because compiling may be what kills the worker.
        """
        states: Iterable[RequestState] = self._awaiting_grammar.values()
        if self._isolation.has_suspects:
            states = [state for state in states if self._isolation.may_compile(state)]
        state = min(states, key=lambda s: (-s.priority, s.edf_key), default=None)
        return None if state is None else state.request

    def note_compiled(self, request_id: str, compiled_grammar: object) -> None:
        """Let a request start whose grammar is compiled. Do nothing if the request is not held any more."""
        state = self._awaiting_grammar.pop(request_id, None)
        if state is not None:
            state.compiled_grammar, state.awaits_grammar = compiled_grammar, False

    def refuse_grammar(self, request_id: str, reason: str) -> None:
        """Refuse a request whose grammar does not compile. Do nothing if the request is not held any more."""
        state = self._awaiting_grammar.pop(request_id, None)
        if state is not None:
            self.table.remove(state)
            self._refused.append((state, reason, ""))

    def refuse(self, now: float) -> Report:
        """Fail the accepted requests that the engine can never serve, and return the report on them."""
        report = Report()
        refused, self._refused = self._refused, []
        for state, reason, code in refused:
            self._outputs.fail(state, reason, now, report, code=code)
        self._inputs.tell_requests(report, now)
        return report

    def evictees_for(self, request_ids: Iterable[str], now: float) -> Sequence[str]:
        """Return the sequences to evict from the step in flight so that one of these requests starts sooner.

        The result is empty if an eviction does not pay, or if no request could start in the next step.
        """
        return self._planner.evictees_for(self.tiers, request_ids, now)

    def cancel(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Drop requests, and return the states of the requests that were held. The next plan aborts their sequences."""
        return self._drop(request_ids, "cancelled")

    def release(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Drop unfinished requests that other workers will serve, for example after a lost lease.

        Return the states of the requests that were held. The next plan aborts their sequences.
        """
        return self._drop(request_ids, "released")

    def release_all(self) -> list[Lease]:
        """Release all requests, and also those that are refused but not reported yet. Return their leases."""
        refused, self._refused = [state for state, *_ in self._refused], []
        for state in refused:
            self._discard(state, "released")
        return [state.lease for state in (*refused, *self.release(list(self._states)))]

    def _drop(self, request_ids: Iterable[str], counter: str) -> list[RequestState]:
        dropped = [self._states[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._states]
        for state in dropped:
            self.table.remove(state)
            self._awaiting_grammar.pop(state.id, None)
            if state.status is not Status.WAITING:
                self._engine_state.abandon(state)
            self._discard(state, counter)
        return dropped

    def _discard(self, state: RequestState, counter: str) -> None:
        state.move(Status.CANCELLED)
        self.counts[counter] += 1

    # -- suspects ----------------------------------------------------------------------------------------------

    @property
    def has_suspects(self) -> bool:
        """Whether there are requests whose earlier attempts ended with their workers, so that they may be to blame."""
        return self._isolation.has_suspects

    def step_marks(self) -> tuple[dict[Lease, bool], Lease | None]:
        """Return of each suspect whether it is in no step, and the request that runs alone in the newest plan."""
        return self._isolation.marks()

    # -- one step ----------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Return the plan of the next step.

        The request states are already updated, so the caller must execute the plan.
        """
        return self._planner.plan(self.tiers, now)

    def plan_async(self, now: float) -> StepPlan | None:
        """Return the plan of the step after the one in flight, if there is nothing left to decide about it; else None.

        The request states are already updated, so the caller must execute the plan.
        """
        return None if self._refused else self._planner.plan_async(now)

    def apply(self, result: StepResult, now: float, overhead_s: float = 0.0) -> Report:
        """Apply the result of a step, and return the report on it.

        `overhead_s` is the time that the host needed for the step in addition to the engine's time.
        """
        report = Report()
        self._learn(result, report)
        if result.evicted:
            self.table.note_evicted(result.evicted, now)
        self._apply_outputs(result, now, report)
        self._inputs.tell_step(report, result.elapsed_s, overhead_s, now)
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
                self._outputs.add(self._states[output.seq_id], output, self.running.bulk_total_s, now, report)
            elif output.finish_reason is not None:
                engine.forget_abandoned(output.seq_id)
        for failure in result.failures:
            if engine.is_abandoned(failure.seq_id):
                engine.forget_abandoned(failure.seq_id)
            else:
                state = self._states[failure.seq_id]
                self.table.remove(state)
                self._outputs.fail(state, failure.reason, now, report)

    def observe_step_time(self, work: StepWork, elapsed_s: float) -> None:
        """Learn the time of a step that the core did not plan, such as a warm-up step at the start."""
        self.step_time.observe(work, elapsed_s)

    def _learn(self, result: StepResult, report: Report) -> None:
        work = self._engine_state.settle(result)
        if work is not None:
            report.work, report.predicted_s = work, self.step_time.predict(work)
            self.step_time.observe(work, result.elapsed_s)
        usage = self.running.end(result)
        report.sequences, report.used_s, report.planned_s = usage.sequences, usage.used_s, usage.planned_s
        self.interactive_s += usage.interactive_s
        for tier, seconds in usage.used_s.items():
            self.used_s[tier] += seconds

    # -- twice a second ----------------------------------------------------------------------------------------

    def review(self, depths: Mapping[str, int], now: float) -> list[Decision]:
        """Boost urgent requests, let the controller move its knobs, and return the controller's decisions.

        `depths` is the number of requests in the queue, by tier.
        """
        return self._inputs.review(self.tiers, depths, self.kv_usage, self.step_time, now)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use new tiers with their SLOs, bounds and min shares. A tier that was removed must not hold requests."""
        self.tiers, self._tier_of = tiers.by_priority, tiers.tiers
        self.table.reconfigure(self._tier_of)
        self.controller.reconfigure(tiers)
