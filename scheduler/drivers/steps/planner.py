"""The planner: it makes the plan of the next step, and says when the step in flight is suspended.

The planner updates the request states when it makes a plan, so the caller must execute the plan. A step is suspended so
that the plan for a newly arrived request comes sooner; a later plan continues it. The planner passes the controller's
budgets, the free capacity of the engine and the request table to `form_batch`, which decides. `StepCore` owns the
planner.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from engine.interface import EngineInfo, PreemptionMode, StepPlan
from engine.step_time.cost import StepWork
from engine.step_time.kind import SHORTEST_S
from engine.step_time.model import StepTimeModel
from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.control.budget import Budgets
from scheduler.control.controller import SLAController
from scheduler.drivers.steps.engine_state import EngineState
from scheduler.drivers.steps.isolation import Isolation
from scheduler.drivers.steps.projection import projected
from scheduler.drivers.steps.running_step import RunningStep
from scheduler.drivers.steps.tracked_step import TrackedStep
from scheduler.holdings.holdings import Holdings
from scheduler.planning.batch import form_batch
from scheduler.planning.batching_delay import idle_until_s
from scheduler.planning.kv_budget import EngineView, has_blocks
from scheduler.planning.prompt_prefixes import PromptPrefixes
from scheduler.planning.speculation import Speculation
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
        self.speculation = Speculation()
        self._next_step_id = 0
        self.idle_until_s = NEVER_S  # if the newest plan was empty: the time at which the first batching delay ends
        self.preemptions: Counter[tuple[str, str]] = Counter()  # number of preemptions, by (tier, mode)
        self.recomputed_tokens: Counter[str] = Counter()  # number of tokens whose KV was lost, by tier

    def plan(self, now: float) -> StepPlan:
        """Return the plan of the next step. The plan is empty if no sequence can run now."""
        budgets, tiers = self.budgets(now), self._tiers(now)
        if self._running.suspended is not None:
            going_on = self._suspended_next(self._running.suspended, tiers, budgets, now)
            if going_on is not None:
                self._running.go_on(now)
                return going_on
            self._running.suspended.num_beside += 1
            tiers, budgets = _interactive_only(tiers, budgets)
        plan = self._with_drafts(self._form(tiers, budgets, now), budgets)
        plan = replace(plan, abort=self._engine_state.pop_aborts())
        self.idle_until_s = self._idle_until_s(budgets, now) if plan.is_empty else NEVER_S
        if not plan.is_empty:
            self._isolation.note_plan(plan)
            self._enter(plan, budgets, now)
        return plan

    def _with_drafts(self, plan: StepPlan, budgets: Budgets) -> StepPlan:
        if not self._engine.verifies_drafts:
            return plan
        limits_s = {name: budget.limit.base_s for name, budget in budgets.tiers.items()}
        view = self._engine_state.view()
        return self.speculation.with_drafts(plan, self._table, view, budgets.decode_cost, budgets.cost, limits_s)

    def _suspended_next(
        self, step: TrackedStep, tiers: Sequence[Tier], budgets: Budgets, now: float
    ) -> StepPlan | None:
        """Return the plan that continues or drops the suspended step; None if it waits.

        Until it is done, no other bulk runs: it has the first claim on what others leave. It goes on where nobody else
        can run, and after each step beside it for as long as bulk may delay the next one, if that is worth it. If it
        has sequences that must not wait, it waits for one step only. It is dropped if a sequence of it must be aborted
        or lose its blocks.
        """
        going_on = StepPlan(step.plan.step_id, proceed_s=NEVER_S)
        if self._isolation.has_suspects:
            return going_on
        beside = self._form(*_interactive_only(tiers, budgets), now)
        lost = {*self._engine_state.aborts, *(preempt.seq_id for preempt in beside.preempt)}
        if not step.runs.keys().isdisjoint(lost):
            return StepPlan(step.plan.step_id, drop=True)
        if not step.may_wait:
            return None if beside.run and not step.num_beside else going_on
        if not step.runs_s.keys() <= {tier.name for tier in tiers}:
            return None  # in a slot without bulk
        if not beside.run:
            return going_on
        proceed_s = self._proceed_s(step, beside, budgets) if step.num_beside else 0.0
        return replace(going_on, proceed_s=proceed_s) if proceed_s > 0 else None

    def _proceed_s(self, step: TrackedStep, beside: StepPlan, budgets: Budgets) -> float:
        """Return for how long the suspended step goes on before the next step beside it; 0: not at all."""
        due = [budget.limit.base_s for budget in budgets.tiers.values() if budget.min_share_due]
        if due:
            return min(due)
        kinds = {(run.state.tier.name, run.state.yields) for run in step.runs.values()}
        of_step = [(budgets.yielding if yields else budgets.tiers)[name] for name, yields in kinds]
        cost = self._step_time.cost()
        layer_s = step.step_s / self._engine.num_layers  # it is suspended at the first boundary after this time
        hard_s = max(b.limit.base_s for b in of_step) - cost.step(cost.runs(self._work(beside))) - layer_s
        proceed_s = min(max(b.added_s for b in of_step), hard_s)
        return proceed_s if proceed_s >= min(step.step_s - step.done_s, cost.step_s) else 0.0

    def _work(self, plan: StepPlan) -> StepWork:
        work = StepWork()
        for run in plan.run:
            work.add(run.num_tokens, self._table.states[run.seq_id].num_computed_tokens, len(run.draft))
        return work

    def drop_suspended(self, now: float) -> StepPlan:
        """Return the plan that drops the suspended step. There must be one."""
        return StepPlan(self._running.go_on(now), drop=True)

    def _form(self, tiers: Sequence[Tier], budgets: Budgets, now: float) -> StepPlan:
        """Return the plan of a shared step, or of a step in which an isolated request runs alone.

        The other kind of step is taken if nothing can run in the first.
        """
        view, aborts = self._engine_state.view(), frozenset(self._engine_state.aborts)
        suspended = self._running.suspended.runs if self._running.suspended is not None else ()

        def shared() -> StepPlan:
            # If a request came back before its old sequence is aborted, it starts in the step after the abort.
            barred = aborts.union(self._isolation.held_back(), suspended)
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
        return min(until_s, max(slot_s, now + SHORTEST_S)) if slot_s > now else until_s

    def suspends_for(self, request_ids: Iterable[str], now: float) -> bool:
        """Return whether to suspend the step in flight, so that one of these requests starts sooner."""
        if not self._running.is_any or not self._controller.suspends_steps or self._isolation.has_suspects:
            return False
        self._let_yield()
        states = (self._table.states.get(request_id) for request_id in request_ids)
        newcomers = [state for state in states if state is not None and state.is_protected]
        return any(self._suspends_for(state, now) and self._could_start(state) for state in newcomers)

    def _suspends_for(self, newcomer: RequestState, now: float) -> bool:
        cost = self._step_time.cost()
        newcomer_s = cost.step(cost.prefill(newcomer.num_uncomputed, newcomer.num_computed_tokens))
        return self._running.suspends_for(newcomer, newcomer_s, now)

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
        left_s = self._running.left_s([s for s in states if not s.yields], is_ahead=is_ahead)
        return self._controller.budgets(states, self._step_time.cost(), now, left_s, self._step_time.cost(mixed=False))

    def _let_yield(self) -> None:
        """Find who yields now. The delay accounts of those that yield no longer begin anew."""
        for state in self._table.set_yielding(self._yielding.find(self._held.tiers, self._table)):
            self._running.accounts.open(state, 0.0, 0.0)

    def _enter(self, plan: StepPlan, budgets: Budgets, now: float) -> None:
        states = self._table.states
        self._next_step_id += 1
        min_shares = frozenset(name for name, budget in budgets.tiers.items() if budget.min_share_due)
        work = self._work(plan)
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
            if not state.output_token_ids and not state.tier.is_interactive:
                self._prefixes.note(state, run.num_tokens)
        for state, seconds in self._running.newest_charges():
            self._yielding.charge(state, seconds)

    def _preempt(self, state: RequestState, mode: PreemptionMode) -> None:
        self.preemptions[state.tier.name, mode.value] += 1
        if mode is PreemptionMode.PAUSE:
            state.move(Status.PAUSED)
            return
        if mode is PreemptionMode.RECOMPUTE:
            self.recomputed_tokens[state.tier.name] += state.num_computed_tokens
        state.lose_blocks(Status.SWAPPED if mode is PreemptionMode.SWAP else Status.PREEMPTED)
        self._table.update(state)


def _interactive_only(tiers: Sequence[Tier], budgets: Budgets) -> tuple[Sequence[Tier], Budgets]:
    """Return the interactive tiers, and the budgets of those that yield to nobody."""
    return [tier for tier in tiers if tier.is_interactive], replace(budgets, yielding={})
