"""The requests that a worker holds for a server that plans its own steps.

Implements `scheduler.worker.core.WorkerCore`. Keeps the request states, and asks the policy what to send and what to
hang up. What a step is for `SchedulerCore`, the tokens of one stream are here. What is known of the server is in
`server_state`, the open streams are in `streams`. Does no I/O; the time is passed in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
    UpstreamUnusable,
)
from scheduler.clock import NEVER_S
from scheduler.config import TierSet
from scheduler.control.budget import Budgets
from scheduler.control.controller import SLAController
from scheduler.control.knobs import Decision
from scheduler.drivers.streams.in_flight_limit import InFlightLimit
from scheduler.drivers.streams.policy import Decisions, View, decide
from scheduler.drivers.streams.recompute_budget import RecomputeBudget
from scheduler.drivers.streams.retries import Retries
from scheduler.drivers.streams.server_state import ServerState
from scheduler.drivers.streams.step_times import SeenStep, UpstreamStepTimes
from scheduler.drivers.streams.streams import StreamTable
from scheduler.holdings.claims import claim_limits, reason_against, reason_to_give_up, restored_tokens
from scheduler.holdings.controller_inputs import ControllerInputs
from scheduler.holdings.outputs import OutputHandler
from scheduler.holdings.report import Report
from scheduler.holdings.request_table import RequestTable
from scheduler.holdings.status import CoreStatus, count_by_status
from scheduler.request import UPSTREAM_REFUSED, WORKER_DIED, Claimed, EventKind, Lease
from scheduler.request_state import RequestState, Status

# Bulk requests that are claimed before the server has a place for them. All others stay in the store, where they are
# sorted with those that come later, and where other workers find them.
BULK_PREFETCH = 4


class StreamCore:
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
        self._refused: list[tuple[RequestState, str, str]] = []  # with the reason, and its code
        self.limit = InFlightLimit(max_in_flight)
        self.recompute = RecomputeBudget()
        self._step_times = UpstreamStepTimes(step_time or StepTimeModel(remembers_sizes=True))
        self._streams = StreamTable(self._table, upstream, self._step_times)
        self.server = ServerState()
        self._retries = Retries(self._streams, self.server, self.limit)
        self._inputs = ControllerInputs(controller, self._table, self._engine)
        self.counts: Counter[str] = Counter()  # accepted, finished, failed, cancelled, released
        self._outputs = OutputHandler(self._table, self.counts, worker_id)
        self._preemptions: Counter[tuple[str, str]] = Counter()
        self._recomputed: Counter[str] = Counter()
        self._restored: Counter[str] = Counter()
        self._used_s: defaultdict[str, float] = defaultdict(float)
        self._bulk_total_s = 0.0
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
        return len(self._streams) > 0

    @property
    def awaits_first_token(self) -> bool:
        """Whether an interactive request is at the server and has no token yet."""
        return self._streams.awaits_first_token

    def count(self, tier: str) -> int:
        return self._table.count(tier)

    def is_down(self, now: float) -> bool:
        """Return whether the server has been away for so long that this worker must not look alive."""
        return self.server.is_down(now)

    def status(self, now: float) -> CoreStatus:
        model = self._step_times.model
        return CoreStatus(
            kv_usage=self.server.kv_usage,
            kv_reserve_blocks=0,
            step_cost=self._step_times.cost(),
            knows_step_times=model.is_warm,
            step_time_error=model.mean_absolute_error,
            held={tier.name: count_by_status(self._table.of_tier(tier.name)) for tier in self.tiers},
            outputs=self._controller.outputs(now),
            used_s=self._used_s,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed,
            restored_tokens=self._restored,
            num_step_evictions=0,
            wasted_s=0.0,
            missing_deadlines=self._inputs.missing_deadlines,
            safety=model.safety,
            decode_cost=model.cost(mixed=False),
        )

    def explain(self, now: float) -> dict[str, Any]:
        return {
            **self._controller.explain(now),
            "upstream": {
                "dialect": self._engine.device,
                "is_reachable": self.server.is_reachable,
                "in_flight": len(self._streams),
                "max_in_flight": None if self.limit.value == NEVER_S else self.limit.value,
                "num_waiting": self.server.num_waiting,
                "computed_tokens": self.recompute.num_computed,
                "recomputed_tokens": self.recompute.num_recomputed,
            },
        }

    # -- requests ----------------------------------------------------------------------------------------------

    def claim_limits(self, now: float) -> dict[str, int]:
        if self._is_held_back(now):
            return {}
        budgets = self._budgets(now)
        for tier in self.tiers:
            if not tier.is_interactive:
                held = self._table.num_resident(tier.name) + BULK_PREFETCH
                budget = replace(budgets.tiers[tier.name], decodes_only=False)
                most = min(budget.max_num_seqs, held)
                budgets = replace(budgets, tiers={**budgets.tiers, tier.name: replace(budget, max_num_seqs=most)})
        held_back = self._retries.num_held_back(now)
        return claim_limits(self.tiers, self._table, budgets, self._engine.max_step_tokens, held_back=held_back)

    def accept(self, claimed: Sequence[Claimed], now: float, wall_ms: int) -> None:
        for item in claimed:
            request = item.request
            self._inputs.note_claimed(request.tier)
            held = self._table.states.get(request.id)
            if held is not None:
                held.fence = item.fence
                continue
            state = self._new_state(item, now, wall_ms)
            self.counts["accepted"] += 1
            if reason := reason_to_give_up(item, state.tier.retry.max_attempts):
                self._refused.append((state, reason, WORKER_DIED))
            elif reason := reason_against(request, self._engine):
                self._refused.append((state, reason, ""))
            else:
                self._table.update(state)
                self._retries.begin(state)
                self._restored[state.tier.name] += state.num_restored

    def _new_state(self, item: Claimed, now: float, wall_ms: int) -> RequestState:
        request = item.request
        continues = self._upstream.can_continue(request.sampling, request.is_seeded)
        output = restored_tokens(item, self._engine) if continues else ()
        return RequestState(
            request=request,
            tier=self._tier_of.get(request.tier, self.tiers[-1]),
            fence=item.fence,
            arrived_s=now - max(0, wall_ms - request.arrival_ms) / 1000,
            claimed_s=now,
            attempt=item.attempt,
            output_token_ids=list(output),
            num_restored=len(output),
            bulk_seen_s=self._bulk_total_s,
        )

    def refuse(self, now: float) -> Report:
        """Fail the requests that the server can never serve, or did not in all attempts. Return the report on them."""
        report = Report()
        refused, self._refused = self._refused, []
        for state, reason, code in refused:
            self._outputs.fail(state, reason, now, report, code=code)
        for state, reason in self._retries.pop_given_up():
            if self._table.states.get(state.id) is state:
                if state.id in self._streams:
                    self._streams.note_hang_up(state.id)
                self._fail(state, reason, now, report, EventKind.UNAVAILABLE)
        self._inputs.tell_requests(report, now)
        return report

    def cancel(self, request_ids: Iterable[str]) -> list[RequestState]:
        return self._drop(request_ids, "cancelled")

    def release(self, request_ids: Iterable[str]) -> list[RequestState]:
        return self._drop(request_ids, "released")

    def release_all(self) -> list[Lease]:
        refused, self._refused = [state for state, *_ in self._refused], []
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
        if state.id in self._streams:
            self._streams.note_hang_up(state.id)
        self._end(state)

    def _end(self, state: RequestState) -> None:
        self._streams.forget(state.id)
        self._retries.forget(state.id)
        self._table.remove(state)

    # -- decisions ---------------------------------------------------------------------------------------------

    def decide(self, now: float) -> tuple[list[StreamRequest], list[str]]:
        """Return the streams to open, and the ids of the requests whose streams to hang up before that.

        The states are already updated, so the caller must do both.
        """
        for state in self._streams.stalled(self._stall_s, now):
            self._retries.count(state, f"The server sent no token for {self._stall_s:g} s.", now)
            self._streams.note_hang_up(state.id)
        decisions = Decisions() if self._is_held_back(now) else decide(self._view(now), now)
        for state in decisions.hang_up:
            self._hang_up(state, now)
        opened = [self._streams.open(s, now) for s in decisions.start if not self._streams.is_hung_up(s.id)]
        return opened, self._streams.pop_hung_up()

    def _is_held_back(self, now: float) -> bool:
        return self.server.is_in_doubt or self.limit.is_paused(now)

    def _view(self, now: float) -> View:
        return View(
            tiers=self.tiers,
            table=self._table,
            budgets=self._budgets(now),
            max_in_flight=self.limit.value,
            max_prefill_tokens=self._engine.max_step_tokens,
            evictable=self._streams.evictable(),
            recompute_tokens=self.recompute.num_tokens,
            hang_up_from_s=self._hang_up_from_s,
            held_back=self._retries.held_back(now),
        )

    def _budgets(self, now: float) -> Budgets:
        return self._controller.budgets(list(self._table.interactive()), self._step_times.cost(), now)

    def can_continue(self, state: RequestState) -> bool:
        """Return whether another worker can continue the request from its output tokens."""
        return state.can_continue and self._streams.can_continue(state)

    def _hang_up(self, state: RequestState, now: float) -> None:
        self.recompute.spend(state.num_tokens)
        self._recomputed[state.tier.name] += state.num_tokens
        self._preemptions[state.tier.name, "recompute"] += 1
        self._streams.interrupt(state, now)
        self._streams.note_hang_up(state.id)
        self._hang_up_from_s = now + self._step_times.cost().step_s

    # -- what the server says ----------------------------------------------------------------------------------------

    def add_output(self, output: SequenceOutput, now: float) -> Report:
        """Apply the new tokens of a stream, and return the report on them."""
        report, state = Report(), self._table.states.get(output.seq_id)
        if state is None or state.id not in self._streams:  # cancelled, or hung up
            return report
        self.server.note_progress(now)
        self._retries.note_output(state, output)
        num_computed, seen = self._streams.learn(state, output, now)
        self.recompute.refill(num_computed)
        if seen is not None:
            self._note_step(seen, now)
        if output.finish_reason is not None:
            self._streams.forget(state.id)
            self._retries.forget(state.id)
        self._outputs.add(state, output, self._bulk_total_s, now, report)
        self._inputs.tell_requests(report, now)
        return report

    def _note_step(self, seen: SeenStep, now: float) -> None:
        for tier, seconds in seen.used_s.items():
            self._used_s[tier] += seconds
            if tier in self._tier_of and not self._tier_of[tier].is_interactive:
                self._bulk_total_s += seconds
        report = Report(sequences=seen.sequences, used_s=seen.used_s, planned_s=seen.predicted_s)
        self._inputs.tell_step(report, seen.elapsed_s, 0.0, now)

    def end_stream(self, request_id: str, error: UpstreamError, now: float) -> tuple[Report, list[Lease]]:
        """Handle the end of a stream whose request is not finished.

        Return the report, and the leases to give back to the queue: another worker may have a place for a request that
        this server refuses at present.
        """
        report, state = Report(), self._table.states.get(request_id)
        if state is None or request_id not in self._streams:
            return report, []
        if isinstance(error, UpstreamBusy):
            goes_back = self._retries.refuse(state, error, now)
            return report, [s.lease for s in self.release([state.id])] if goes_back else []
        if isinstance(error, UpstreamLost):
            self._retries.lose(state, error, now)
        else:
            self._fail(state, str(error), now, report, EventKind.FAILED, UPSTREAM_REFUSED)
        self._inputs.tell_requests(report, now)
        return report, []

    def _fail(
        self, state: RequestState, error: str, now: float, report: Report, kind: EventKind, code: str = ""
    ) -> None:
        self._end(state)
        self._outputs.fail(state, error, now, report, kind, code)

    def note_load(self, load: UpstreamLoad | None, now: float) -> None:
        """Record that the server answers, and what it says of its load."""
        self._retries.note_served(was_down=self.is_down(now))
        self.server.note_load(load)
        if load is not None:
            self.limit.note_load(load, len(self._streams), now)

    def note_unreachable(self, error: UpstreamError, now: float) -> None:
        """Record that the server did not say its load."""
        self.server.note_unreachable(error, now, is_certain=isinstance(error, UpstreamUnusable))

    def give_back(self, now: float) -> list[Lease]:
        """Release the requests that another worker can serve as well, because the server is down. Return their leases.

        Requests with tokens that can be continued stay, because only this worker knows their tokens. Those with which
        nobody can go on are given up.
        """
        if not self.is_down(now):
            return []
        held = [s for s in self.states if not (s.output_token_ids and self._streams.can_continue(s))]
        ending = self._retries.end_unfinishable(held, self.server.reason)
        return [state.lease for state in self.release([s.id for s in held if s not in ending])]

    # -- twice a second ----------------------------------------------------------------------------------------

    def review(self, depths: Mapping[str, int], now: float) -> list[Decision]:
        self.limit.grow(len(self._streams), now)
        return self._inputs.review(self.tiers, depths, self.server.kv_usage, self._step_times.model, now)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use new tiers. A tier that was removed must not hold requests."""
        self.tiers, self._tier_of = tiers.by_priority, tiers.tiers
        self._table.reconfigure(self._tier_of)
        self._controller.reconfigure(tiers)
