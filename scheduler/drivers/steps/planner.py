"""The planner: it makes the plan of the next step, and chooses the sequences to evict from the step in flight.

The planner updates the request states when it makes a plan, so the caller must execute the plan. An eviction ends or
shortens the running step, so that the plan for a newly arrived request comes sooner. The planner passes the
controller's budgets, the free capacity of the engine and the request table to `form_batch`, which decides.
`StepCore` owns the planner.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from engine.interface import EngineInfo, PreemptionMode, StepEviction, StepPlan
from engine.step_time.cost import StepWork
from engine.step_time.model import StepTimeModel
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import Budgets
from scheduler.control.controller import SLAController
from scheduler.control.step_limit import Allowance
from scheduler.drivers.steps.engine_state import EngineState
from scheduler.drivers.steps.isolation import Isolation
from scheduler.drivers.steps.projection import projected
from scheduler.drivers.steps.running_step import RunningStep
from scheduler.holdings.holdings import Holdings
from scheduler.planning.batch import form_batch
from scheduler.planning.batching_delay import MIN_WAIT_S, idle_until_s
from scheduler.planning.kv_budget import EngineView, has_blocks
from scheduler.planning.prompt_prefixes import PromptPrefixes
from scheduler.planning.yielding import Yielding
from scheduler.request_state import RequestState, Status


class Planner:
    """The part of the core that makes plans and enters them into the request states."""

    def __init__(
        self,
        held: Holdings,
        engine: EngineInfo,
        controller: SLAController,
        step_time: StepTimeModel,
        engine_state: EngineState,
        running: RunningStep,
        isolation: Isolation,
    ) -> None:
        self._engine = engine
        self._controller = controller
        self._step_time = step_time
        self._held = held
        self._table = held.table
        self._engine_state = engine_state
        self._running = running
        self._isolation = isolation
        self._prefixes = PromptPrefixes(engine)
        self._yielding = Yielding()
        self._next_step_id = 0
        self.idle_until_s = NEVER_S  # if the newest plan was empty: the time at which the first batching delay ends
        self.preemptions: Counter[tuple[str, str]] = Counter()  # number of preemptions, by (tier, mode)
        self.recomputed_tokens: Counter[str] = Counter()  # number of tokens whose KV was lost, by tier

    def plan(self, now: float) -> StepPlan:
        """Return the plan of the next step. The plan is empty if no sequence can run now."""
        budgets = self.budgets(now)
        plan = self._form(budgets, now)
        plan = replace(plan, abort=self._engine_state.pop_aborts())
        self.idle_until_s = self._idle_until_s(budgets, now) if plan.is_empty else NEVER_S
        if not plan.is_empty:
            self._isolation.note_plan(plan)
            self._enter(plan, budgets, now)
        return plan

    def _form(self, budgets: Budgets, now: float) -> StepPlan:
        """Return the plan of a shared step, or of a step in which an isolated request runs alone.

        The other kind of step is taken if nothing can run in the first.
        """
        view, aborts = self._engine_state.view(), frozenset(self._engine_state.aborts)
        tiers = self._tiers(now)

        def shared() -> StepPlan:
            # If a request came back before its old sequence is aborted, it starts in the step after the abort.
            barred = aborts.union(self._isolation.held_back())
            return self._form_batch(tiers, budgets, now, view, barred)

        def single(state: RequestState) -> StepPlan:
            return self._form_batch((state.tier,), budgets, now, view, self._table.states.keys() - {state.id})

        alone = self._isolation.next_alone()
        if alone is None or alone.id in aborts or alone.tier not in tiers:
            return shared()
        if self._isolation.is_turn:
            plan = single(alone)
            return plan if plan.run else shared()
        plan = shared()
        return plan if plan.run else single(alone)

    def plan_ahead(self, now: float) -> StepPlan | None:
        """Return the plan of the step after the one in flight, before the result of that one is known.

        `now` is the time at which the step in flight is expected to end. Like `plan`, it updates the request states.
        Return None if the plan must wait for the result: if nothing could run, or a sequence must be aborted or lose
        its blocks, since it may be in the step in flight.
        """
        running = self._running.plan
        if (
            running is None
            or self._engine.steps_ahead < 1
            or self._engine_state.num_abandoned
            or self._isolation.has_suspects
            or self._running.copies_blocks
        ):
            return None
        with projected(running, self._table, self._engine_state.view()) as after:
            budgets = self.budgets(now, is_ahead=True)
            plan = self._form_batch(self._tiers(now), budgets, now, after.view, after.ending)
            if not plan.run or any(preempt.mode is not PreemptionMode.PAUSE for preempt in plan.preempt):
                return None
            plan = replace(plan, ahead=True)
            self._enter(plan, budgets, now)
        return plan

    def _form_batch(
        self, tiers: Sequence[Tier], budgets: Budgets, now: float, view: EngineView, barred: Container[str]
    ) -> StepPlan:
        return form_batch(self._next_step_id, view, tiers, self._table, budgets, now, barred, self._prefixes)

    def _tiers(self, now: float) -> Sequence[Tier]:
        """Return the tiers that may run: in a slot without bulk, the interactive ones alone."""
        is_on = self._controller.measures_slowdown
        withheld = self._running.slowdown.withholds(is_on, self._table.interactive(), now)
        return [tier for tier in self._held.tiers if tier.is_interactive or not withheld]

    def _idle_until_s(self, budgets: Budgets, now: float) -> float:
        """Return the time at which a batching delay or a slot without bulk ends, whichever is first."""
        until_s = idle_until_s(self._held.tiers, self._table, budgets, now)
        slot_s = self._running.slowdown.until_s
        return min(until_s, max(slot_s, now + MIN_WAIT_S)) if slot_s > now else until_s

    def evictees_for(self, request_ids: Iterable[str], now: float) -> Sequence[str]:
        """Return the sequences to evict from the step in flight so that one of these requests starts sooner.

        The result is empty if an eviction does not pay, or if no request could start in the next step.
        """
        if not self._running.is_any:
            return ()
        self._let_yield()
        for request_id in request_ids:
            state = self._table.states.get(request_id)
            if state is not None and state.is_protected and self._could_start(state):
                evictees = self._running.evictees(state, self._controller.step_eviction, now)
                if evictees:
                    return evictees
        return ()

    def _could_start(self, state: RequestState) -> bool:
        """Return whether the request could start.

        It needs a slot, enough blocks that are free or held by lower tiers, and its grammar compiled if it has one.
        """
        if state.awaits_grammar:
            return False
        slots = self._controller.max_num_seqs(state.tier.name) + self._table.num_yielding(state.tier.name)
        below = (s for t in self._held.tiers for s in self._table.of_tier(t.name) if s.priority < state.priority)
        has_slot = self._table.num_resident(state.tier.name) < slots
        return has_slot and has_blocks(state, self._engine_state.view(), below)

    def budgets(self, now: float, *, is_ahead: bool = False) -> Budgets:
        """Return the budgets of the next step. It comes after the step in flight if `is_ahead`, else at once."""
        self._let_yield()
        states = list(self._table.interactive())
        can_waste = self._controller.step_eviction is not StepEviction.NOTHING
        waste_s = self._running.waste_budget.level if can_waste else NEVER_S
        allowed = Allowance(self._running.left_s(self._owed(states), is_ahead=is_ahead), waste_s)
        return self._controller.budgets(states, self._step_time.cost(), now, allowed, self._step_time.cost(mixed=False))

    def _owed(self, states: Sequence[RequestState]) -> Iterable[RequestState]:
        """Return the requests that others may delay only so far: those of keys of which none yields."""
        yielding = {state.request.owner for state in states if state.yields}
        return (state for state in states if state.request.owner not in yielding) if yielding else states

    def _let_yield(self) -> None:
        """Find who yields now. The delay accounts of those that yield no longer begin anew."""
        for state in self._table.set_yielding(self._yielding.find(self._held.tiers, self._table)):
            self._running.accounts.open(state, 0.0, 0.0)

    def _enter(self, plan: StepPlan, budgets: Budgets, now: float) -> None:
        states = self._table.states
        self._next_step_id += 1
        min_shares = frozenset(name for name, budget in budgets.tiers.items() if budget.min_share_due)
        work = StepWork()
        for run in plan.run:
            work.add(run.num_tokens, states[run.seq_id].num_computed_tokens)
        expected_s = self._step_time.predict(work) if plan.run else 0.0
        self._running.begin(plan, states, self._step_time.cost(mixed=work.is_mixed), now, min_shares, expected_s)
        for preempt in plan.preempt:
            states[preempt.seq_id].stop(now, preempt.mode.value)
            self._preempt(states[preempt.seq_id], preempt.mode)
        for seq_id in (*plan.resume, *(new.seq_id for new in plan.start)):
            states[seq_id].move(Status.RUNNING)
            states[seq_id].resume(now)
            self._table.update(states[seq_id])
        if plan.run:
            self._table.note_run([run.seq_id for run in plan.run])
        for run in plan.run:
            state = states[run.seq_id]
            state.last_step = plan.step_id
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now
            if state.tier.is_interactive:
                self._yielding.charge(state, self._running.cost_of(run.seq_id))
            if not state.output_token_ids and not state.tier.is_interactive:
                self._prefixes.note(state, run.num_tokens)

    def _preempt(self, state: RequestState, mode: PreemptionMode) -> None:
        self.preemptions[state.tier.name, mode.value] += 1
        if mode is PreemptionMode.PAUSE:
            state.move(Status.PAUSED)
            return
        if mode is PreemptionMode.RECOMPUTE:
            self.recomputed_tokens[state.tier.name] += state.num_computed_tokens
        state.lose_blocks(Status.SWAPPED if mode is PreemptionMode.SWAP else Status.PREEMPTED)
        self._table.update(state)
