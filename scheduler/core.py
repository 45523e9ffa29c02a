"""The scheduler without I/O: takes requests in, makes plans, takes results in, says what to report.

`SchedulerCore` owns every `RequestState` and is their only writer. It knows tiers and tokens; it does not know queues,
engines, clocks or metrics: those meet in `loop`. Conservation holds at every instant:
accepted = finished + failed + cancelled + released + held.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.interface import (
    EngineInfo,
    FinishReason,
    PreemptionMode,
    SequenceOutput,
    StepPlan,
    StepResult,
    blocks_for,
)
from engine.latency_model import StepTimeModel
from scheduler.acceptance import reason_against
from scheduler.batch import Budgets, form_batch
from scheduler.config import TierSet
from scheduler.continuation import continuation
from scheduler.engine_books import EngineBooks
from scheduler.queue.base import Lease
from scheduler.report import Ended, PrefixLookup, Sample, StepReport
from scheduler.request import Claimed, Delivery, EventKind, TokenEvent
from scheduler.roster import Roster
from scheduler.sla import SLAController
from scheduler.states import RequestState, Status

BULK_REPORT_S = 0.1  # between two token events of a stream without a latency promise
PREFETCH = 4  # claimed beyond the free slots, so that a slot freed in a step is filled in the next


class SchedulerCore:
    def __init__(self, tiers: TierSet, engine: EngineInfo, controller: SLAController) -> None:
        self.tiers = tiers.by_priority
        self._tier_of = tiers.tiers
        self._engine = engine
        self.controller = controller
        self.step_time = StepTimeModel()
        self._states: dict[str, RequestState] = {}
        self._roster = Roster(self.tiers)
        self._books = EngineBooks(engine)
        self._refused: list[tuple[RequestState, str]] = []
        self._next_step_id = 0
        self.counts: Counter[str] = Counter()
        self.preemptions: Counter[tuple[str, str]] = Counter()  # (tier, mode)

    # -- what is held ------------------------------------------------------------------------------------------

    @property
    def states(self) -> Iterable[RequestState]:
        return self._states.values()

    @property
    def num_held(self) -> int:
        return len(self._states)

    @property
    def kv_usage(self) -> float:
        return self._books.kv_usage

    def holds(self, request_id: str) -> bool:
        return request_id in self._states

    @property
    def is_step_in_flight(self) -> bool:
        """A plan was made whose result has not been applied."""
        return self._books.is_step_in_flight

    def tier_of(self, request_id: str) -> str:
        return self._states[request_id].tier.name

    def leases(self) -> list[Lease]:
        return [Lease(s.id, s.fence) for s in self._states.values()]

    def num_held_of(self, tier: str) -> int:
        return self._roster.count(tier)

    def count(self, tier: str, *statuses: Status) -> int:
        """Looks at all states of the tier: for upkeep, not for every step."""
        return sum(s.status in statuses for s in self._roster.of_tier(tier))

    def _budgets(self, now: float) -> Budgets:
        interactive = [s for t in self.tiers if t.is_interactive for s in self._roster.of_tier(t.name)]
        return self.controller.budgets(interactive, self.step_time.cost(), now)

    def claim_limits(self, now: float) -> dict[str, int]:
        """How many more of each tier to take from the queue, highest tier first. The engine's own queue stays
        shallow: policy can only reorder what still waits in the store."""
        budgets = self._budgets(now)
        limits: dict[str, int] = {}
        for tier in self.tiers:
            budget = budgets.tiers[tier.name]
            room = budget.max_num_seqs + (PREFETCH if tier.is_interactive else 0) - self._roster.count(tier.name)
            if room > 0 and not budget.paused:
                limits[tier.name] = room
        return limits

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
                tier=self._tier_of[request.tier],
                fence=item.fence,
                arrived_s=now - age_s,
                claimed_s=now,
            )
            self.counts["accepted"] += 1
            reason = reason_against(item, self._engine)
            if reason:
                self._refused.append((state, reason))
            else:
                self._states[request.id] = state
                self._roster.file(state)

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
                self._books.abandon(state)
            state.move(status)
            self.counts[counter] += 1
            leases.append(Lease(request_id, state.fence))
        return leases

    def _forget(self, request_id: str) -> RequestState:
        state = self._states.pop(request_id)
        self._roster.remove(state)
        return state

    # -- one step ----------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """The next step, already entered into the states: the caller must execute it."""
        # One that has come back while its old life is to be aborted starts in the step after that.
        barred = frozenset(self._books.aborts)
        plan = form_batch(
            self._next_step_id, self._books.view(), self.tiers, self._roster, self._budgets(now), now, barred
        )
        plan = replace(plan, abort=self._books.take_aborts())
        if not plan.is_empty:
            self._next_step_id += 1
            self._enter(plan, now)
        return plan

    def plan_ahead(self, now: float) -> StepPlan | None:
        """The step after the one that runs, as far as that is certain already: the same decodes, without those that
        end there. None where there is anything to decide."""
        running = self._books.running
        if running is None or self._engine.steps_ahead < 1 or self._refused:
            return None
        plan = continuation(running, self._next_step_id, self._books.view(), self._roster)
        if plan is None or self._books.num_abandoned:
            return None
        self._next_step_id += 1
        self._enter(plan, now)
        return plan

    def predicted_s(self, plan: StepPlan) -> float:
        """How long a step of decodes will take."""
        cost = self.step_time.cost()
        states = (self._states.get(run.seq_id) for run in plan.run)
        return cost.step_s + sum(cost.decode(s.num_computed_tokens) for s in states if s is not None)

    def _enter(self, plan: StepPlan, now: float) -> None:
        self._books.enter(plan, self._states)
        for preempt in plan.preempt:
            self._enter_preemption(self._states[preempt.seq_id], preempt.mode)
        for seq_id in (*plan.resume, *(new.seq_id for new in plan.start)):
            self._states[seq_id].move(Status.RUNNING)
            self._roster.file(self._states[seq_id])
        if plan.run:
            self._roster.note_run([run.seq_id for run in plan.run])
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
            state.lose_blocks(Status.SWAPPED if mode is PreemptionMode.SWAP else Status.PREEMPTED)
            self._roster.file(state)

    def apply(self, result: StepResult, now: float) -> StepReport:
        """Take a step's result in."""
        report = StepReport()
        work = self._books.settle(result)
        if work is not None:
            self.step_time.observe(work, result.elapsed_s)
        for seq_id, num_shared in result.shared_blocks:
            if seq_id in self._states and not self._books.is_abandoned(seq_id):
                self._states[seq_id].num_shared_blocks = num_shared
        for output in result.outputs:
            if not self._books.is_abandoned(output.seq_id):
                self._take_output(self._states[output.seq_id], output, now, report)
            elif output.finish_reason is not None:
                self._books.forget_abandoned(output.seq_id)
        for failure in result.failures:
            if self._books.is_abandoned(failure.seq_id):
                self._books.forget_abandoned(failure.seq_id)
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
            self._report_lookup(state, report)
        state.output_token_ids.extend(output.token_ids)
        self._roster.file(state)
        if output.token_ids:
            report.samples += state.time_token(now)
        if output.finish_reason is not None:
            self._finish(state, output.finish_reason, now, report)
        elif output.token_ids and self._is_due(state, now):
            event = TokenEvent(
                request_id=state.id,
                kind=EventKind.TOKENS,
                index=state.num_reported,
                token_ids=state.report_tokens(now),
                cached_tokens=state.num_cached_tokens,
            )
            report.events[state.request.reply_to].append(event)

    def _report_lookup(self, state: RequestState, report: StepReport) -> None:
        if state.request.sampling.prompt_logprobs is None:  # else nothing was looked up
            queried = len(state.request.prompt_token_ids)
            report.lookups.append(PrefixLookup(state.tier.name, queried, state.num_cached_tokens or 0))

    def _is_due(self, state: RequestState, now: float) -> bool:
        """A stream without a latency promise gets its tokens a few at a time: reported one by one, those of a full
        bulk batch would keep the gateway busy while interactive ones wait their turn there."""
        if state.request.delivery is Delivery.AT_END:
            return False
        return state.tier.is_interactive or state.reported_s is None or now - state.reported_s >= BULK_REPORT_S

    def _finish(self, state: RequestState, reason: FinishReason, now: float, report: StepReport) -> None:
        event = TokenEvent(
            request_id=state.id,
            kind=EventKind.FINISHED,
            index=state.num_reported,
            token_ids=state.report_tokens(now),
            finish_reason=reason,
            cached_tokens=state.num_cached_tokens or 0,
        )
        self._forget(state.id)
        state.move(Status.FINISHED)
        self.counts["finished"] += 1
        report.samples.append(Sample("e2e", state.tier.name, now - state.arrived_s))
        self._end(state, event, reason.value, now, report)

    def _fail(self, state: RequestState, reason: str, now: float, report: StepReport) -> None:
        state.move(Status.FAILED)
        self.counts["failed"] += 1
        event = TokenEvent(state.id, EventKind.FAILED, index=state.num_reported, error=reason)
        self._end(state, event, "failed", now, report)

    def _end(self, state: RequestState, event: TokenEvent, reason: str, now: float, report: StepReport) -> None:
        state.ended_s = now
        report.events[state.request.reply_to].append(event)
        report.leases.append(Lease(state.id, state.fence))
        prompt, output = len(state.request.prompt_token_ids), len(state.output_token_ids)
        met_slo = state.status is Status.FINISHED and state.met_slo()
        report.ended.append(Ended(state.tier.name, reason, prompt, output, met_slo))

    def check(self) -> None:
        """Raise AssertionError where a law is broken. Cheap enough for every step of a test."""
        ends = sum(self.counts[k] for k in ("finished", "failed", "cancelled", "released"))
        held = len(self._states) + len(self._refused)
        assert self.counts["accepted"] == ends + held, "conservation"
        own = [s.own_blocks(self._engine.block_size) for s in self._states.values()]
        assert min(own, default=0) >= 0 and sum(own) <= self._engine.num_blocks, "blocks"
        need = [blocks_for(s.num_computed_tokens, self._engine.block_size) for s in self.states]
        assert all(n <= self._engine.num_blocks for n in need)
