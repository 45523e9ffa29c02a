"""The scheduler without I/O: takes requests in, plans steps, takes their results in, and says what to report.

`SchedulerCore` owns every `RequestState`; only the parts that it owns itself (`table`, `_outputs`) write to them. It
also owns what the SLA controller learns: `apply` and `review` feed it. It knows tiers and tokens, and no queue, engine,
clock or metrics: `scheduler.worker` connects these. Conservation holds at every instant: accepted = finished + failed +
cancelled + released + held + refused but not reported yet.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.interface import EngineInfo, PreemptionMode, StepPlan, StepResult
from engine.step_time.model import StepCost, StepTimeModel, StepWork
from scheduler.clock import NEVER_S
from scheduler.config import TierSet
from scheduler.control.budget import Budgets
from scheduler.control.controller import SLAController
from scheduler.control.knobs import Decision
from scheduler.planning.async_plan import async_plan
from scheduler.planning.batch import form_batch
from scheduler.planning.batching_delay import idle_until_s
from scheduler.planning.claims import claim_limits, reason_against
from scheduler.planning.controller_inputs import ControllerInputs
from scheduler.planning.engine_state import EngineState
from scheduler.planning.kv_budget import has_blocks
from scheduler.planning.output_handler import OutputHandler
from scheduler.planning.plan_entry import enter_plan
from scheduler.planning.request_table import RequestTable
from scheduler.planning.running_step import RunningStep
from scheduler.planning.status import CoreStatus, count_by_status
from scheduler.planning.step_report import StepReport
from scheduler.request import Claimed, Lease
from scheduler.request_state import RequestState, Status


class SchedulerCore:
    def __init__(
        self, tiers: TierSet, engine: EngineInfo, controller: SLAController, step_time: StepTimeModel | None = None
    ) -> None:
        self.tiers = tiers.by_priority
        self._tier_of = tiers.tiers
        self._engine = engine
        self.controller = controller
        self.step_time = step_time or StepTimeModel()
        self.running = RunningStep()
        self.table = RequestTable(self.tiers)
        self._states = self.table.states
        self._engine_state = EngineState(engine)
        self._inputs = ControllerInputs(controller, self.table, engine)
        self._refused: list[tuple[RequestState, str]] = []
        self._next_step_id = 0
        self._guaranteed: frozenset[str] = frozenset()  # tiers whose min share the newest plan serves
        self._idle_until_s = NEVER_S
        self.used_s: defaultdict[str, float] = defaultdict(float)  # engine time, by tier
        self.recomputed_tokens: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.preemptions: Counter[tuple[str, str]] = Counter()  # (tier, mode)
        self._outputs = OutputHandler(self.table, self._engine_state, self.counts)

    # -- what others may see -----------------------------------------------------------------------------------

    @property
    def states(self) -> Iterable[RequestState]:
        """All requests that are held. Only the core may change them."""
        return self._states.values()

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
        """A plan was made whose result has not been applied."""
        return self._engine_state.is_step_in_flight

    @property
    def running_step_s(self) -> float:
        """Predicted length of the step in flight; 0 where there is none."""
        return self.running.step_s

    @property
    def idle_until_s(self) -> float:
        """When the newest plan was empty although requests wait: the time at which a batching delay ends."""
        return self._idle_until_s

    def status(self, now: float) -> CoreStatus:
        """Looks at all states: for twice a second, not for every step."""
        return CoreStatus(
            kv_usage=self.kv_usage,
            kv_reserve_blocks=self.controller.kv_reserve_blocks,
            step_cost=self.step_time.cost(),
            knows_step_times=self.step_time.is_warm,
            step_time_error=self.step_time.mean_absolute_error,
            held={tier.name: count_by_status(self.table.of_tier(tier.name)) for tier in self.tiers},
            outputs=self.controller.outputs(now),
            used_s=self.used_s,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            num_step_evictions=self.running.credit.num_evictions,
            wasted_s=self.running.credit.wasted_s,
        )

    def explain(self, now: float) -> dict[str, Any]:
        """Return what the controller does and why, as plain data."""
        return self.controller.explain(now)

    # -- requests ----------------------------------------------------------------------------------------------

    def claim_limits(self, now: float) -> dict[str, int]:
        """How many more of each tier to take from the queue, highest tier first."""
        max_step_tokens = self._engine.max_step_tokens
        return claim_limits(
            self.tiers, self.table, self._budgets(now), max_step_tokens, self._engine_state.ending(self._states)
        )

    def accept(self, claimed: Sequence[Claimed], now: float, wall_ms: int) -> None:
        """Take claimed requests in. `now` and `wall_ms` are the same instant on both clocks."""
        for item in claimed:
            self._inputs.note_claimed(item.request.tier)
            held = self._states.get(item.request.id)
            if held is not None:  # our lease lapsed and we claimed the request again: go on under the newer lease
                held.fence = item.fence
                continue
            state = self._new_state(item, now, wall_ms)
            self.counts["accepted"] += 1
            reason = reason_against(item, self._engine, state.tier.retry.max_attempts)
            if reason:
                self._refused.append((state, reason))
            else:
                self.table.file(state)

    def _new_state(self, item: Claimed, now: float, wall_ms: int) -> RequestState:
        request = item.request
        return RequestState(
            request=request,
            tier=self._tier_of.get(request.tier, self.tiers[-1]),  # its tier may have been removed just now
            fence=item.fence,
            arrived_s=now - max(0, wall_ms - request.arrival_ms) / 1000,
            claimed_s=now,
            bulk_seen_s=self.running.bulk_total_s,
            found_step_s=self.running.step_s if self.is_step_in_flight else 0.0,
        )

    def refuse(self, now: float) -> StepReport:
        """Report the accepted requests that can never run."""
        report = StepReport()
        refused, self._refused = self._refused, []
        for state, reason in refused:
            self._outputs.fail(state, reason, now, report)
        self._inputs.tell_requests(report, now)
        return report

    def evictees_for(self, request_ids: Iterable[str], now: float) -> Sequence[str]:
        """Return the sequences to evict from the step in flight so that one of these requests starts sooner. Empty if
        that does not pay, or if none of the requests could be in the very next step."""
        if not self.is_step_in_flight:
            return ()
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None and state.tier.is_interactive and self._could_start(state):
                evictees = self.running.evictees(state, self.controller.step_eviction, now)
                if evictees:
                    return evictees
        return ()

    def _could_start(self, state: RequestState) -> bool:
        """The request has a slot, and blocks that are free or held by lower tiers."""
        slots = self.controller.max_num_seqs(state.tier.name)
        below = (s for t in self.tiers if t.priority < state.priority for s in self.table.of_tier(t.name))
        return self.table.num_resident(state.tier.name) < slots and has_blocks(state, self._engine_state.view(), below)

    def cancel(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Drop requests; the next plan aborts their sequences. Return the states of those that were held."""
        return self._drop(request_ids, "cancelled")

    def release(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Leave unfinished requests to other workers (a lost lease). Return the states of those that were held."""
        return self._drop(request_ids, "released")

    def release_all(self) -> list[Lease]:
        """Give everything back unfinished, also requests that are refused but not reported yet. Return the leases."""
        refused, self._refused = [state for state, _ in self._refused], []
        for state in refused:
            self._discard(state, "released")
        return [state.lease for state in (*refused, *self.release(list(self._states)))]

    def _drop(self, request_ids: Iterable[str], counter: str) -> list[RequestState]:
        dropped = [self._states[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._states]
        for state in dropped:
            self.table.remove(state)
            if state.status is not Status.WAITING:
                self._engine_state.abandon(state)
            self._discard(state, counter)
        return dropped

    def _discard(self, state: RequestState, counter: str) -> None:
        state.move(Status.CANCELLED)
        self.counts[counter] += 1

    # -- one step ----------------------------------------------------------------------------------------------

    def _budgets(self, now: float) -> Budgets:
        return self.controller.budgets(list(self.table.interactive()), self._next_cost(), now)

    def _next_cost(self) -> StepCost:
        """Costs of the kind of step that is likely next: with prefills, or of decodes only."""
        return self.step_time.cost(mixed=self.table.any_pending)

    def plan(self, now: float) -> StepPlan:
        """The next step, already entered into the states: the caller must execute it."""
        # A request that came back while its old sequence is to be aborted starts in the step after the abort.
        barred, budgets = frozenset(self._engine_state.aborts), self._budgets(now)
        plan = form_batch(self._next_step_id, self._engine_state.view(), self.tiers, self.table, budgets, now, barred)
        plan = replace(plan, abort=self._engine_state.take_aborts())
        self._idle_until_s = idle_until_s(self.tiers, self.table, budgets, now) if plan.is_empty else NEVER_S
        if not plan.is_empty:
            self._guaranteed = frozenset(name for name, budget in budgets.tiers.items() if budget.guaranteed)
            self._enter(plan, now)
        return plan

    def plan_async(self, now: float) -> StepPlan | None:
        """The step after the one in flight, as far as that is certain already: the same decodes, without those that
        end there. None where there is anything to decide."""
        running = self._engine_state.running
        if running is None or self._engine.steps_ahead < 1 or self._refused or self._engine_state.num_abandoned:
            return None
        plan = async_plan(running, self._next_step_id, self._engine_state.view(), self.table)
        if plan is not None:
            self._enter(plan, now)
        return plan

    def _enter(self, plan: StepPlan, now: float) -> None:
        self._next_step_id += 1
        self._engine_state.enter(plan, self._states)
        self.running.begin(plan, self._states, self._next_cost(), now, self._guaranteed)
        for preempt in plan.preempt:
            self._count_preemption(self._states[preempt.seq_id], preempt.mode)
        enter_plan(plan, self.table, now)

    def _count_preemption(self, state: RequestState, mode: PreemptionMode) -> None:
        self.preemptions[state.tier.name, mode.value] += 1
        if mode is PreemptionMode.RECOMPUTE:
            self.recomputed_tokens[state.tier.name] += state.num_computed_tokens

    def apply(self, result: StepResult, now: float, overhead_s: float = 0.0) -> StepReport:
        """Take a step's result in. `overhead_s`: what the host took for the step beside the engine's own time."""
        report = StepReport()
        self._learn(result, report)
        if result.evicted:
            self.table.note_left(result.evicted)
        self._outputs.apply(result, self.running.bulk_total_s, now, report)
        self._inputs.tell_step(report, result.elapsed_s, overhead_s, now)
        return report

    def observe_step_time(self, work: StepWork, elapsed_s: float) -> None:
        """Learn from a step that was not planned here (the warm-up at start)."""
        self.step_time.observe(work, elapsed_s)

    def _learn(self, result: StepResult, report: StepReport) -> None:
        work = self._engine_state.settle(result)
        if work is not None:
            report.work, report.predicted_s = work, self.step_time.predict(work)
            self.step_time.observe(work, result.elapsed_s)
        usage = self.running.end(result)
        report.sequences, report.used_s = usage.sequences, usage.used_s
        for tier, seconds in usage.used_s.items():
            self.used_s[tier] += seconds

    # -- twice a second ----------------------------------------------------------------------------------------

    def review(self, depths: Mapping[str, int], now: float) -> list[Decision]:
        """Boost urgent requests and let the controller move its knobs; return its decisions. `depths`: requests in the
        queue, by tier."""
        return self._inputs.review(self.tiers, depths, self.kv_usage, self.step_time, now)

    def reconfigure(self, tiers: TierSet) -> None:
        """Adopt other SLOs, bounds, min shares and tiers. A tier that is gone must hold nothing."""
        self.tiers, self._tier_of = tiers.by_priority, tiers.tiers
        self.table.reconfigure(self._tier_of)
        self.controller.reconfigure(tiers)
