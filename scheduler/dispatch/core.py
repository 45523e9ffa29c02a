"""The requests that a worker holds for a server that plans its own steps.

Implements `scheduler.worker.core.WorkerCore`. Keeps the request states, learns the server's pace from its tokens, and
asks the policy what to send and what to hang up. What a step is for `SchedulerCore`, the tokens of one stream are here.
Does no I/O; the time is passed in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.interface import SequenceOutput
from engine.step_time.model import StepTimeModel
from engine.streaming import (
    StreamRequest,
    Upstream,
    UpstreamBusy,
    UpstreamError,
    UpstreamLoad,
    UpstreamLost,
    UpstreamUnreachable,
)
from scheduler.clock import NEVER_S
from scheduler.config import TierSet
from scheduler.control.budget import Budgets
from scheduler.control.controller import SLAController
from scheduler.control.knobs import Decision
from scheduler.dispatch.in_flight_limit import InFlightLimit
from scheduler.dispatch.pace import SeenStep, UpstreamPace
from scheduler.dispatch.policy import Decisions, View, decide
from scheduler.dispatch.recompute_budget import RecomputeBudget
from scheduler.planning.claims import claim_limits, reason_against
from scheduler.planning.controller_inputs import ControllerInputs
from scheduler.planning.output_handler import OutputHandler
from scheduler.planning.request_table import RequestTable
from scheduler.planning.status import CoreStatus, count_by_status
from scheduler.planning.step_report import StepReport
from scheduler.request import Claimed, EventKind, Lease
from scheduler.request_state import RequestState, Status

# Bulk requests that are claimed before the server has a place for them. All others stay in the store, where they are
# sorted with those that come later, and where other workers find them.
BULK_PREFETCH = 4
DOWN_GRACE_S = 2.0  # seconds without the server after which the worker counts as dead


@dataclass(slots=True)
class Stream:
    """One stream of a request. Only `DispatchCore` changes it."""

    begun_s: float
    progress_s: float  # time of the newest tokens, or of the begin
    num_before: int  # output tokens that the request had before this stream
    is_alone: bool  # whether no other stream has run since this one began
    has_tokens: bool = False


class DispatchCore:
    """The scheduler of one worker in front of a server."""

    def __init__(
        self,
        tiers: TierSet,
        upstream: Upstream,
        controller: SLAController,
        *,
        max_in_flight: int | None = None,
        stall_s: float = 30.0,
        step_time: StepTimeModel | None = None,
        worker_id: str = "",
    ) -> None:
        """`max_in_flight` bounds the streams (None: learned); a stream without tokens for `stall_s` counts as lost."""
        self.tiers = tiers.by_priority
        self._tier_of = tiers.tiers
        self._upstream = upstream
        self._engine = upstream.info
        self._controller = controller
        self._stall_s = stall_s
        self._table = RequestTable(self.tiers)
        self._streams: dict[str, Stream] = {}
        self._attempts: dict[str, int] = {}  # claims and lost streams of each held request
        self._refused: list[tuple[RequestState, str]] = []
        self._given_up: list[tuple[RequestState, str]] = []  # held requests after their last attempt
        self._hung_up: list[str] = []  # ids whose streams the driver must hang up
        self.limit = InFlightLimit(max_in_flight)
        self.recompute = RecomputeBudget()
        self._pace = UpstreamPace(step_time or StepTimeModel())
        self._inputs = ControllerInputs(controller, self._table, self._engine)
        self.counts: Counter[str] = Counter()  # accepted, finished, failed, cancelled, released
        self._outputs = OutputHandler(self._table, self.counts, worker_id)
        self._preemptions: Counter[tuple[str, str]] = Counter()
        self._recomputed: Counter[str] = Counter()
        self._used_s: defaultdict[str, float] = defaultdict(float)
        self._bulk_total_s = 0.0
        self._load = UpstreamLoad()
        self._down_since_s: float | None = None
        self._progress_s = -NEVER_S  # time of the newest token of any stream
        self._hang_up_from_s = -NEVER_S

    # -- readings ----------------------------------------------------------------------------------------------

    @property
    def states(self) -> Iterable[RequestState]:
        return self._table.states.values()

    @property
    def num_held(self) -> int:
        return len(self._table)

    @property
    def num_interactive(self) -> int:
        return sum(self._table.count(tier.name) for tier in self.tiers if tier.is_interactive)

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def is_step_in_flight(self) -> bool:
        return bool(self._streams)

    @property
    def awaits_first_token(self) -> bool:
        """Whether an interactive request is at the server and has no token yet."""
        states = self._table.states
        return any(states[i].tier.is_interactive and states[i].awaits_first_token for i in self._streams)

    def count(self, tier: str) -> int:
        return self._table.count(tier)

    def is_down(self, now: float) -> bool:
        """Return whether the server has been away for so long that this worker must not look alive."""
        return self._down_since_s is not None and now - self._down_since_s >= DOWN_GRACE_S

    def status(self, now: float) -> CoreStatus:
        model = self._pace.model
        return CoreStatus(
            kv_usage=self._load.kv_usage or 0.0,
            kv_reserve_blocks=0,
            step_cost=model.cost(),
            knows_step_times=model.is_warm,
            step_time_error=model.mean_absolute_error,
            held={tier.name: count_by_status(self._table.of_tier(tier.name)) for tier in self.tiers},
            outputs=self._controller.outputs(now),
            used_s=self._used_s,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed,
            num_step_evictions=0,
            wasted_s=0.0,
            missing_deadlines=self._inputs.missing_deadlines,
        )

    def explain(self, now: float) -> dict[str, Any]:
        return {
            **self._controller.explain(now),
            "upstream": {
                "dialect": self._engine.device,
                "is_reachable": self._down_since_s is None,
                "in_flight": len(self._streams),
                "max_in_flight": None if self.limit.value == NEVER_S else self.limit.value,
                "num_waiting": self._load.num_waiting,
                "computed_tokens": self.recompute.num_computed,
                "recomputed_tokens": self.recompute.num_recomputed,
            },
        }

    # -- requests ----------------------------------------------------------------------------------------------

    def claim_limits(self, now: float) -> dict[str, int]:
        if self._down_since_s is not None or self.limit.is_paused(now):
            return {}
        budgets = self._budgets(now)
        for tier in self.tiers:
            if not tier.is_interactive:
                held = self._table.num_resident(tier.name) + BULK_PREFETCH
                budget = replace(budgets.tiers[tier.name], decodes_only=False)
                most = min(budget.max_num_seqs, held)
                budgets = replace(budgets, tiers={**budgets.tiers, tier.name: replace(budget, max_num_seqs=most)})
        return claim_limits(self.tiers, self._table, budgets, self._engine.max_step_tokens)

    def accept(self, claimed: Sequence[Claimed], now: float, wall_ms: int) -> None:
        for item in claimed:
            request = item.request
            self._inputs.note_claimed(request.tier)
            held = self._table.states.get(request.id)
            if held is not None:
                held.fence = item.fence
                continue
            state = RequestState(
                request=request,
                tier=self._tier_of.get(request.tier, self.tiers[-1]),
                fence=item.fence,
                arrived_s=now - max(0, wall_ms - request.arrival_ms) / 1000,
                claimed_s=now,
                bulk_seen_s=self._bulk_total_s,
            )
            self.counts["accepted"] += 1
            reason = reason_against(item, self._engine, state.tier.retry.max_attempts)
            if reason:
                self._refused.append((state, reason))
            else:
                self._table.update(state)
                self._attempts[state.id] = item.attempt

    def refuse(self, now: float) -> StepReport:
        """Fail the requests that the server can never serve, or did not in all attempts. Return the report on them."""
        report = StepReport()
        refused, self._refused = self._refused, []
        for state, reason in refused:
            self._outputs.fail(state, reason, now, report)
        given_up, self._given_up = self._given_up, []
        for state, reason in given_up:
            if state.id in self._table.states:
                self._fail(state, reason, now, report, EventKind.UNAVAILABLE)
        self._inputs.tell_requests(report, now)
        return report

    def cancel(self, request_ids: Iterable[str]) -> list[RequestState]:
        return self._drop(request_ids, "cancelled")

    def release(self, request_ids: Iterable[str]) -> list[RequestState]:
        return self._drop(request_ids, "released")

    def release_all(self) -> list[Lease]:
        refused, self._refused = [state for state, _ in self._refused], []
        for state in refused:
            state.move(Status.CANCELLED)
            self.counts["released"] += 1
        return [state.lease for state in (*refused, *self.release(list(self._table.states)))]

    def _drop(self, request_ids: Iterable[str], counter: str) -> list[RequestState]:
        found = (self._table.states.get(request_id) for request_id in dict.fromkeys(request_ids))
        dropped = [state for state in found if state is not None]
        for state in dropped:
            self._forget(state)
            state.move(Status.CANCELLED)
            self.counts[counter] += 1
        return dropped

    def _forget(self, state: RequestState) -> None:
        """Remove a request that ends here. If it has a stream, the driver must hang up."""
        if self._streams.pop(state.id, None) is not None:
            self._hung_up.append(state.id)
        self._pace.forget(state.id)
        self._attempts.pop(state.id, None)
        self._table.remove(state)

    # -- decisions ---------------------------------------------------------------------------------------------

    def decide(self, now: float) -> tuple[list[StreamRequest], list[str]]:
        """Return the streams to open, and the ids of the requests whose streams to hang up before that.

        The states are already updated, so the caller must do both.
        """
        for request_id in [i for i, s in self._streams.items() if now - s.progress_s > self._stall_s]:
            self._lose(self._table.states[request_id], f"The server sent no token for {self._stall_s:g} s.", now)
            self._hung_up.append(request_id)
        decisions = Decisions() if self._is_held_back(now) else decide(self._view(now), now)
        for state in decisions.hang_up:
            self._hang_up(state, now)
        opened = [self._open(state, now) for state in decisions.start if state.id not in self._hung_up]
        hung_up, self._hung_up = self._hung_up, []
        return opened, hung_up

    def _is_held_back(self, now: float) -> bool:
        return self._down_since_s is not None or self.limit.is_paused(now)

    def _view(self, now: float) -> View:
        return View(
            tiers=self.tiers,
            table=self._table,
            budgets=self._budgets(now),
            max_in_flight=self.limit.value,
            max_prefill_tokens=self._engine.max_step_tokens,
            evictable=self._evictable(),
            recompute_tokens=self.recompute.num_tokens,
            hang_up_from_s=self._hang_up_from_s,
        )

    def _budgets(self, now: float) -> Budgets:
        cost = self._pace.model.cost(mixed=self._table.any_pending)
        return self._controller.budgets(list(self._table.interactive()), cost, now)

    def _evictable(self) -> list[RequestState]:
        """Return the streams of bulk that may be hung up: each has grown by a KV block, and can be continued."""
        states = [self._table.states[request_id] for request_id in self._streams]
        found = [state for state in states if not state.tier.is_interactive and self._may_hang_up(state)]
        return sorted(found, key=lambda s: (s.priority, -self._streams[s.id].begun_s, s.id))

    def _may_hang_up(self, state: RequestState) -> bool:
        grown = len(state.output_token_ids) - self._streams[state.id].num_before
        is_spared = grown < self._engine.block_size or state.num_preemptions >= state.tier.retry.max_preemptions
        return not is_spared and self._can_continue(state)

    def _can_continue(self, state: RequestState) -> bool:
        return self._upstream.can_continue(state.request.sampling, state.request.is_seeded)

    def _hang_up(self, state: RequestState, now: float) -> None:
        self.recompute.take(state.num_tokens)
        self._recomputed[state.tier.name] += state.num_tokens
        self._preemptions[state.tier.name, "recompute"] += 1
        self._close(state, now)
        self._hung_up.append(state.id)
        self._hang_up_from_s = now + self._pace.model.cost().step_s

    def _close(self, state: RequestState, now: float) -> None:
        """Record that a request has lost its stream, and keeps its tokens."""
        self._streams.pop(state.id, None)
        self._pace.forget(state.id)
        state.stop(now)
        state.lose_blocks(Status.PREEMPTED)
        self._table.update(state)

    def _open(self, state: RequestState, now: float) -> StreamRequest:
        request = state.request
        state.move(Status.RUNNING)
        state.resume(now)
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now
        self._table.update(state)
        for other in self._streams.values():
            other.is_alone = False
        self._streams[state.id] = Stream(now, now, len(state.output_token_ids), not self._streams)
        return StreamRequest(
            seq_id=state.id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            priority=state.tier.priority,
            is_seeded=request.is_seeded,
            output_token_ids=tuple(state.output_token_ids),
        )

    # -- what the server says ----------------------------------------------------------------------------------------

    def take(self, output: SequenceOutput, now: float) -> StepReport:
        """Apply the new tokens of a stream, and return the report on them."""
        report, state = StepReport(), self._table.states.get(output.seq_id)
        stream = self._streams.get(output.seq_id)
        if state is None or stream is None:  # cancelled, or hung up
            return report
        stream.progress_s = self._progress_s = now
        if output.token_ids:
            self._learn(state, stream, output, now)
        if output.finish_reason is not None:
            self._streams.pop(state.id)
            self._pace.forget(state.id)
            self._attempts.pop(state.id, None)
        self._outputs.take(state, output, self._bulk_total_s, now, report)
        self._inputs.tell_requests(report, now)
        return report

    def _learn(self, state: RequestState, stream: Stream, output: SequenceOutput, now: float) -> None:
        num_new, num_prefilled = len(output.token_ids), 0
        if not stream.has_tokens:
            num_prefilled = max(1, state.num_tokens - output.num_cached_tokens)
            if stream.is_alone:
                self._pace.note_alone(num_prefilled, now - stream.begun_s)
        stream.has_tokens = True
        self.recompute.refill(num_new + num_prefilled)
        seen = self._pace.note_tokens(state, num_new, num_prefilled, now)
        if seen is not None:
            self._note_step(seen, now)

    def _note_step(self, seen: SeenStep, now: float) -> None:
        for tier, seconds in seen.used_s.items():
            self._used_s[tier] += seconds
            if tier in self._tier_of and not self._tier_of[tier].is_interactive:
                self._bulk_total_s += seconds
        report = StepReport(sequences=seen.sequences, used_s=seen.used_s, planned_s=seen.predicted_s)
        self._inputs.tell_step(report, seen.elapsed_s, 0.0, now)

    def end_stream(self, request_id: str, error: UpstreamError, now: float) -> tuple[StepReport, list[Lease]]:
        """Handle the end of a stream whose request is not finished.

        Return the report, and the leases to give back to the queue: another worker may have a place for a request that
        this server refuses at present.
        """
        report, state = StepReport(), self._table.states.get(request_id)
        if state is None or request_id not in self._streams:
            return report, []
        if isinstance(error, UpstreamBusy):
            self.limit.note_busy(len(self._streams), error.retry_after_s, now)
            self._close(state, now)
            return report, [] if state.output_token_ids else [s.lease for s in self.release([request_id])]
        if isinstance(error, UpstreamUnreachable):
            self.note_unreachable(now, is_certain=True)
            self._rewind(state, now)
        elif isinstance(error, UpstreamLost):
            self.limit.pause(now)
            self._lose(state, str(error), now)
        else:
            self._fail(state, str(error), now, report, EventKind.FAILED)
        self._inputs.tell_requests(report, now)
        return report, []

    def _lose(self, state: RequestState, reason: str, now: float) -> None:
        """Prepare another attempt at a request whose stream has broken off. After the last one, it is given up."""
        self._attempts[state.id] += 1
        self._rewind(state, now)
        if self._attempts[state.id] > state.tier.retry.max_attempts:
            attempts = state.tier.retry.max_attempts
            self._given_up.append((state, f"{reason} The request was given up after {attempts} attempts."))

    def _rewind(self, state: RequestState, now: float) -> None:
        """Put a request without a stream to where another stream can go on.

        It continues from its tokens, or begins again if that would not give the same tokens. The gateway drops the
        tokens that it has already.
        """
        self._close(state, now)
        if not self._can_continue(state):
            state.output_token_ids.clear()
            state.report_logprobs()
            state.num_reported = 0

    def _fail(self, state: RequestState, error: str, now: float, report: StepReport, kind: EventKind) -> None:
        self._streams.pop(state.id, None)
        self._pace.forget(state.id)
        self._attempts.pop(state.id, None)
        self._table.remove(state)
        self._outputs.fail(state, error, now, report, kind)

    def note_load(self, load: UpstreamLoad | None, now: float) -> None:
        """Record that the server answers, and what it says of its load."""
        self._down_since_s = None
        if load is not None:
            self._load = load
            self.limit.note_load(load, len(self._streams), now)

    def note_unreachable(self, now: float, *, is_certain: bool = False) -> None:
        """Record that the server does not take connections.

        Unless it `is_certain`, newer tokens count for more: a busy server may answer late.
        """
        if self._down_since_s is None and (is_certain or now - self._progress_s > DOWN_GRACE_S):
            self._down_since_s = now

    def give_back(self, now: float) -> list[Lease]:
        """Release the requests that another worker can serve as well, because the server is down. Return their leases.

        Requests with tokens that can be continued stay: only this worker knows their tokens.
        """
        if not self.is_down(now):
            return []
        held = [s.id for s in self.states if not (s.output_token_ids and self._can_continue(s))]
        return [state.lease for state in self.release(held)]

    # -- twice a second ----------------------------------------------------------------------------------------

    def review(self, depths: Mapping[str, int], now: float) -> list[Decision]:
        self.limit.grow(len(self._streams), now)
        return self._inputs.review(self.tiers, depths, self._load.kv_usage or 0.0, self._pace.model, now)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use new tiers. A tier that was removed must not hold requests."""
        self.tiers, self._tier_of = tiers.by_priority, tiers.tiers
        self._table.reconfigure(self._tier_of)
        self._controller.reconfigure(tiers)
