"""The scheduler without I/O: takes requests in, makes plans, takes results in, says what to report.

`SchedulerCore` owns every `RequestState`; only what it owns itself (`table`, `reporting`) writes to them. It knows
tiers and tokens; it does not know queues, engines, clocks or metrics: those meet in `loop`. Conservation holds at every
instant: accepted = finished + failed + cancelled + released + held.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.interface import (
    EngineInfo,
    FinishReason,
    PreemptionMode,
    SequenceOutput,
    StepPlan,
    StepResult,
)
from engine.step_time.cost import StepCost
from engine.step_time.model import StepTimeModel
from scheduler.clock import NEVER_S
from scheduler.config import TierSet
from scheduler.control.budget import Budgets
from scheduler.control.controller import SLAController
from scheduler.deadlines import boosted_priority, urgencies
from scheduler.planning import step_report
from scheduler.planning.async_plan import async_plan
from scheduler.planning.batch import form_batch
from scheduler.planning.batching_delay import idle_until_s
from scheduler.planning.claims import claim_limits, reason_against
from scheduler.planning.engine_state import EngineState
from scheduler.planning.kv_budget import has_blocks
from scheduler.planning.request_table import RequestTable
from scheduler.planning.running_step import RunningStep
from scheduler.planning.step_report import Reaction, StepReport
from scheduler.request import Claimed, Lease, TokenEvent
from scheduler.request_state import RequestState, Sample, Status


class SchedulerCore:
    def __init__(self, tiers: TierSet, engine: EngineInfo, controller: SLAController) -> None:
        self.tiers = tiers.by_priority
        self._tier_of = tiers.tiers
        self._engine = engine
        self.controller = controller
        self.step_time = StepTimeModel()
        self.running = RunningStep()
        self.table = RequestTable(self.tiers)
        self._states = self.table.states
        self._engine_state = EngineState(engine)
        self._refused: list[tuple[RequestState, str]] = []
        self._next_step_id = 0
        self._guaranteed: frozenset[str] = frozenset()  # tiers whose floor the newest plan pays
        self._idle_until_s = NEVER_S
        self.used_s: defaultdict[str, float] = defaultdict(float)  # engine time, by tier
        self.recomputed_tokens: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.preemptions: Counter[tuple[str, str]] = Counter()  # (tier, mode)

    # -- what is held ------------------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        return len(self.table)

    @property
    def kv_usage(self) -> float:
        return self._engine_state.kv_usage

    @property
    def is_step_in_flight(self) -> bool:
        """A plan was made whose result has not been applied."""
        return self._engine_state.is_step_in_flight

    def _budgets(self, now: float) -> Budgets:
        return self.controller.budgets(list(self.table.interactive()), self._cost(), now)

    def _cost(self) -> StepCost:
        """Of the kind of step that is likely next: with prefills, or of decodes only."""
        return self.step_time.cost(mixed=self.table.any_pending)

    def claim_limits(self, now: float) -> dict[str, int]:
        """How many more of each tier to take from the queue, highest tier first."""
        max_step_tokens = self._engine.max_step_tokens
        return claim_limits(self.tiers, self.table, self._budgets(now), max_step_tokens, self._ending())

    def _ending(self) -> Counter[str]:
        """Sequences that end with the step that runs, for certain, by tier."""
        running = self._engine_state.running
        ran = ((run, self._states.get(run.seq_id)) for run in running.run) if running is not None else ()
        return Counter(s.tier.name for run, s in ran if s is not None and s.ends_with(run.num_tokens))

    # -- in ----------------------------------------------------------------------------------------------------

    def accept(self, claimed: Sequence[Claimed], now: float, wall_ms: int) -> None:
        """Take claimed requests in. `now` and `wall_ms` are the same instant on both clocks."""
        for item in claimed:
            request = item.request
            held = self._states.get(request.id)
            if held is not None:  # our lease lapsed and we claimed it again: go on under the newer one
                held.fence = item.fence
                continue
            age_s = max(0, wall_ms - request.arrival_ms) / 1000
            state = RequestState(
                request=request,
                tier=self._tier_of.get(request.tier, self.tiers[-1]),  # it may have been removed just now
                fence=item.fence,
                arrived_s=now - age_s,
                claimed_s=now,
                bulk_seen_s=self.running.bulk_total_s,
                found_step_s=self.running.step_s if self.is_step_in_flight else 0.0,
            )
            self.counts["accepted"] += 1
            reason = reason_against(item, self._engine, state.tier.retry.max_attempts)
            if reason:
                self._refused.append((state, reason))
            else:
                self.table.file(state)

    def evictees_for(self, request_ids: Iterable[str], now: float) -> Sequence[str]:
        """Who shall leave the step in flight, so that one of these requests is begun sooner: nobody, if that does not
        pay, or if none of them could be in the very next step."""
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
        """It has a slot, and blocks that are free or held by lower tiers."""
        slots = self.controller.max_num_seqs(state.tier.name)
        below = (s for t in self.tiers if t.priority < state.priority for s in self.table.of_tier(t.name))
        return self.table.num_resident(state.tier.name) < slots and has_blocks(state, self._engine_state.view(), below)

    def cancel(self, request_ids: Iterable[str]) -> list[Lease]:
        """Drop requests; their sequences leave the batch in the next step. The leases of those held."""
        return self._drop(request_ids, Status.CANCELLED, "cancelled")

    def release(self, request_ids: Iterable[str]) -> list[Lease]:
        """Leave requests to others, unfinished (a lost lease). The leases of those held."""
        return self._drop(request_ids, Status.CANCELLED, "released")

    def release_all(self) -> list[Lease]:
        """Give everything back unfinished (shutdown)."""
        return self.release(list(self._states))

    def _drop(self, request_ids: Iterable[str], status: Status, counter: str) -> list[Lease]:
        leases = []
        for request_id in request_ids:
            if request_id not in self._states:
                continue
            state = self._forget(request_id)
            if state.status is not Status.WAITING:
                self._engine_state.abandon(state)
            state.move(status)
            self.counts[counter] += 1
            leases.append(state.lease)
        return leases

    def _forget(self, request_id: str) -> RequestState:
        state = self._states[request_id]
        self.table.remove(state)
        return state

    # -- one step ----------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """The next step, already entered into the states: the caller must execute it."""
        # One that has come back while its old life is to be aborted starts in the step after that.
        barred, budgets = frozenset(self._engine_state.aborts), self._budgets(now)
        plan = form_batch(self._next_step_id, self._engine_state.view(), self.tiers, self.table, budgets, now, barred)
        plan = replace(plan, abort=self._engine_state.take_aborts())
        self._idle_until_s = idle_until_s(self.tiers, self.table, budgets, now) if plan.is_empty else NEVER_S
        if not plan.is_empty:
            self._next_step_id += 1
            self._guaranteed = frozenset(name for name, budget in budgets.tiers.items() if budget.guaranteed)
            self._enter(plan, now)
        return plan

    @property
    def idle_until_s(self) -> float:
        """Where the newest plan was empty though requests wait: when they will have waited for company long enough."""
        return self._idle_until_s

    def plan_async(self, now: float) -> StepPlan | None:
        """The step after the one that runs, as far as that is certain already: the same decodes, without those that
        end there. None where there is anything to decide."""
        running = self._engine_state.running
        if running is None or self._engine.steps_ahead < 1 or self._refused or self._engine_state.num_abandoned:
            return None
        plan = async_plan(running, self._next_step_id, self._engine_state.view(), self.table)
        if plan is None:
            return None
        self._next_step_id += 1
        self._enter(plan, now)
        return plan

    def _enter(self, plan: StepPlan, now: float) -> None:
        self._engine_state.enter(plan, self._states)
        self.running.begin(plan, self._states, self._cost(), now, self._guaranteed)
        for preempt in plan.preempt:
            self._enter_preemption(self._states[preempt.seq_id], preempt.mode)
        for seq_id in (*plan.resume, *(new.seq_id for new in plan.start)):
            self._states[seq_id].move(Status.RUNNING)
            self.table.file(self._states[seq_id])
        if plan.run:
            self.table.note_run([run.seq_id for run in plan.run])
        for run in plan.run:
            state = self._states[run.seq_id]
            state.last_step = plan.step_id
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now

    def _enter_preemption(self, state: RequestState, mode: PreemptionMode) -> None:
        self.preemptions[state.tier.name, mode.value] += 1
        if mode is PreemptionMode.PAUSE:
            state.move(Status.PAUSED)
        else:
            if mode is PreemptionMode.RECOMPUTE:
                self.recomputed_tokens[state.tier.name] += state.num_computed_tokens
            state.lose_blocks(Status.SWAPPED if mode is PreemptionMode.SWAP else Status.PREEMPTED)
            self.table.file(state)

    def apply(self, result: StepResult, now: float) -> StepReport:
        """Take a step's result in."""
        report = StepReport()
        work = self._engine_state.settle(result)
        if work is not None:
            report.work, report.predicted_s = work, self.step_time.predict(work)
            self.step_time.observe(work, result.elapsed_s)
        report.used_s = self.running.end(result)
        for tier, seconds in report.used_s.items():
            self.used_s[tier] += seconds
        if result.evicted:
            self.table.note_left(result.evicted)
        for seq_id, num_shared in result.shared_blocks:
            if seq_id in self._states and not self._engine_state.is_abandoned(seq_id):
                self._states[seq_id].num_shared_blocks = num_shared
        for output in result.outputs:
            if not self._engine_state.is_abandoned(output.seq_id):
                self._take_output(self._states[output.seq_id], output, now, report)
            elif output.finish_reason is not None:
                self._engine_state.forget_abandoned(output.seq_id)
        for failure in result.failures:
            if self._engine_state.is_abandoned(failure.seq_id):
                self._engine_state.forget_abandoned(failure.seq_id)
            else:
                self._fail(self._forget(failure.seq_id), failure.reason, now, report)
        return report

    def refuse(self, now: float) -> StepReport:
        """Report what was accepted but can never run."""
        report = StepReport()
        refused, self._refused = self._refused, []
        for state, reason in refused:
            self._fail(state, reason, now, report)
        return report

    def _take_output(self, state: RequestState, output: SequenceOutput, now: float, report: StepReport) -> None:
        state.num_computed_tokens = output.num_computed_tokens
        if state.num_cached_tokens is None:
            state.num_cached_tokens = output.num_cached_tokens
            report.lookups += filter(None, [step_report.lookup(state)])
        state.output_token_ids.extend(output.token_ids)
        self.table.file(state)
        if output.token_ids:
            if state.awaits_first_token and state.reaction_steps is not None:
                report.reactions.append(Reaction(state.tier.name, state.reaction_steps))
            report.samples += state.time_token(now, self.running.bulk_total_s)
        if output.finish_reason is not None:
            self._finish(state, output.finish_reason, now, report)
        elif output.token_ids and step_report.is_due(state, now):
            report.events[state.request.reply_to].append(step_report.progress_event(state, now))

    def _finish(self, state: RequestState, reason: FinishReason, now: float, report: StepReport) -> None:
        event = step_report.finished_event(state, reason, now)
        self._forget(state.id)
        state.move(Status.FINISHED)
        self.counts["finished"] += 1
        report.samples.append(Sample("e2e", state.tier.name, now - state.arrived_s))
        self._end(state, event, reason.value, now, report)

    def _fail(self, state: RequestState, reason: str, now: float, report: StepReport) -> None:
        state.move(Status.FAILED)
        self.counts["failed"] += 1
        self._end(state, step_report.failed_event(state, reason), "failed", now, report)

    def _end(self, state: RequestState, event: TokenEvent, reason: str, now: float, report: StepReport) -> None:
        state.ended_s = now
        report.events[state.request.reply_to].append(event)
        report.leases.append(state.lease)
        report.ended.append(step_report.ended(state, reason, now))

    # -- upkeep ------------------------------------------------------------------------------------------------

    def review(self, now: float) -> None:
        """Now and then: whose deadline nears, or who has waited too long; and what blocks interactive tiers hold."""
        cost, top = self.step_time.cost(), boosted_priority(self.tiers)
        raised: list[str] = []
        for tier in self.tiers:
            pressing = urgencies(tier, self.table.of_tier(tier.name), cost, now)
            self.controller.set_urgency(tier.name, max(pressing.values(), default=0.0))
            raised += pressing
        self.table.boost(raised, top)
        held = sum(s.blocks_held(self._engine.block_size) for s in self.table.interactive())
        self.controller.observe_blocks(held, self._engine.num_blocks)

    def reconfigure(self, tiers: TierSet) -> None:
        """Other promises, bounds, floors, tiers. Those that are gone must hold nothing."""
        self.tiers, self._tier_of = tiers.by_priority, tiers.tiers
        self.table.reconfigure(self._tier_of)
        self.controller.reconfigure(tiers)
