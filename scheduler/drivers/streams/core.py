"""The scheduler in front of a server that plans its own steps.

Asks the policy what to send and what to hang up. `held` has the requests. What a step is for `StepCore`, the
tokens of one stream are here. What is known of the server is in `server_state`, the open streams are in `streams`. Does
no I/O; the time is passed in.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

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
from scheduler.drivers.streams.in_flight_limit import InFlightLimit, SlowStart, free_places
from scheduler.drivers.streams.policy import Decisions, View, decide
from scheduler.drivers.streams.precedence import Precedence
from scheduler.drivers.streams.recompute import Recompute
from scheduler.drivers.streams.retries import Retries
from scheduler.drivers.streams.server_state import ServerState
from scheduler.drivers.streams.step_times import SeenStep, UpstreamStepTimes
from scheduler.drivers.streams.streams import StreamTable, may_continue
from scheduler.holdings.claims import claim_limits
from scheduler.holdings.holdings import Holdings
from scheduler.holdings.report import Report
from scheduler.holdings.status import CoreStatus
from scheduler.request import UPSTREAM_REFUSED, EventKind, Lease
from scheduler.request_state import RequestState

# Bulk requests that are claimed before the server has a place for them. All others stay in the store, where they are
# sorted with those that come later, and where other workers find them.
BULK_PREFETCH = 4


class StreamCore:
    """The scheduler of one worker in front of a server. Implements `scheduler.worker.driver.WorkerCore`."""

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
        self.held = Holdings(
            tiers,
            upstream.info,
            controller,
            self._begin,
            self._drop,
            lambda request: may_continue(upstream, request),
            worker_id,
        )
        self._table = self.held.table
        self._engine = upstream.info
        self._controller = controller
        self._stall_s = stall_s
        self.limit = InFlightLimit(max_in_flight)
        self._slow_start = SlowStart()
        self.recompute = Recompute()
        self._step_times = UpstreamStepTimes(step_time or StepTimeModel(remembers_sizes=True))
        self._streams = StreamTable(self._table, upstream, self._step_times, self.recompute)
        self.server = ServerState()
        self._retries = Retries(self._streams, self.server, self.limit, self._give_up)
        self._preemptions: Counter[tuple[str, str]] = Counter()
        self._bulk_total_s = 0.0
        self._hang_up_from_s = -NEVER_S
        self._precedence = Precedence(self._table, self._step_times.model)

    # -- readings ----------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def is_busy(self) -> bool:
        return self.num_in_flight > 0

    @property
    def awaits_first_token(self) -> bool:
        """Whether an interactive request is at the server and has no token yet."""
        return self._streams.awaits_first_token

    def status(self, now: float) -> CoreStatus:
        return replace(
            self.held.status(self._step_times.model, now),
            step_cost=self._step_times.cost(),
            kv_usage=self.server.kv_usage,
            preemptions=self._preemptions,
            recomputed_tokens=self.recompute.tokens,
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
                "recomputed_tokens": self.recompute.tokens.total(),
            },
        }

    # -- requests ----------------------------------------------------------------------------------------------

    def claim_limits(self, now: float) -> dict[str, int]:
        if self._is_held_back(now):
            return {}
        budgets = self._budgets(now)
        for tier in self.held.tiers:
            if not tier.is_interactive:
                most = self._table.num_resident(tier.name) + BULK_PREFETCH
                budget = budgets.tiers[tier.name]
                budget = replace(budget, max_num_seqs=min(budget.max_num_seqs, most))
                budgets = replace(budgets, tiers={**budgets.tiers, tier.name: budget})
        held_back = self._retries.busy.num_waiting(now)
        return claim_limits(self.held.tiers, self._table, budgets, held_back=held_back)

    def _begin(self, state: RequestState) -> None:
        state.bulk_seen_s = self._bulk_total_s
        self._precedence.begin(state)

    def _drop(self, state: RequestState) -> None:
        """Forget a request that ends here. If it has a stream, the driver must hang up."""
        if state.id in self._streams:
            self._streams.note_hang_up(state.id)
        self._forget(state)

    def _forget(self, state: RequestState) -> None:
        self._streams.forget(state.id)
        self._retries.busy.forget(state.id)

    def _give_up(self, state: RequestState, reason: str) -> None:
        """Let a request fail with the next report, if it is still held."""
        if self._table.states.get(state.id) is state:
            self._table.remove(state)
            self._drop(state)
            self.held.note_refused(state, reason, kind=EventKind.UNAVAILABLE)

    # -- decisions ---------------------------------------------------------------------------------------------

    def decide(self, now: float) -> tuple[list[StreamRequest], list[str]]:
        """Return the streams to open, and the ids of the requests whose streams to hang up before that.

        The states are already updated, so the caller must do both.
        """
        self.recompute.note_time(self._step_times.cost().prefill_token_s, now, is_busy=self.is_busy)
        for state in self._streams.stalled(self._stall_s, now):
            silent_s = now - self._streams[state.id].progress_s
            self._retries.retry(state, f"The server sent no token for {silent_s:.0f} s.", now)
            self._streams.note_hang_up(state.id)
        decisions = Decisions() if self._is_held_back(now) else decide(self._view(now), now)
        for state in decisions.hang_up:
            self._hang_up(state, now)
        start, parts = decisions.start, decisions.parts
        opened = [self._streams.open(s, now, parts.get(s.id)) for s in start if not self._streams.is_hung_up(s.id)]
        return opened, self._streams.pop_hung_up()

    def _is_held_back(self, now: float) -> bool:
        return self.server.is_in_doubt or self.limit.is_paused(now)

    def _view(self, now: float) -> View:
        self._precedence.update(self.held.tiers, now)
        return View(
            tiers=self.held.tiers,
            table=self._table,
            budgets=self._budgets(now),
            max_in_flight=self.limit.value,
            slow_start=self._slow_start.value,
            max_prefill_tokens=self._engine.max_step_tokens,
            evictable=self._streams.evictable(),
            recompute_tokens=self.recompute.hang_ups.level,
            has_traffic=self._precedence.has_traffic,
            hang_up_from_s=self._hang_up_from_s,
            held_back=self._retries.busy.waiting(now),
            kept=self._streams.found,
            lost=self._streams.lost,
            sent=self._streams.num_sent,
            is_unbegun=self._streams.is_unbegun,
            may_cut=self._streams.may_cut,
            loss=self._streams.loss,
            block_size=self._engine.block_size,
            left_s=self._precedence.left_s(),
        )

    def _budgets(self, now: float) -> Budgets:
        return self._controller.budgets(list(self._table.interactive()), self._step_times.cost(), now)

    def _hang_up(self, state: RequestState, now: float) -> None:
        self.recompute.note_hang_up(state.tier.name, self._streams.lost(state))
        self._streams.interrupt(state, now)
        self._preemptions[state.tier.name, "recompute"] += 1
        self._streams.note_hang_up(state.id)
        self._hang_up_from_s = now + self._step_times.cost().step_s

    # -- what the server says ----------------------------------------------------------------------------------------

    def add_output(self, output: SequenceOutput, now: float) -> Report:
        """Apply the new tokens of a stream, and return the report on them."""
        report, state = Report(), self._table.states.get(output.seq_id)
        if state is None or state.id not in self._streams:  # cancelled, or hung up
            return report
        self.server.progress_s = now
        num_computed, seen = self._streams.learn(state, output, now)
        if num_computed > len(output.token_ids):
            self._retries.busy.note_served(state, self._streams[state.id].begun_s)
        if seen is not None:
            self._note_step(seen, now)
        self._note_cached(state, output)
        if self._streams[state.id].part is not None:  # nobody gets its token
            if output.finish_reason is not None:
                self._streams.pause(state, now)
            return report
        is_part = self._streams.is_part(state, output)
        if is_part:
            output = structs.replace(output, finish_reason=None)
        elif output.finish_reason is not None:
            self._forget(state)
        self.held.outputs.add(state, output, self._bulk_total_s, now, report)
        if is_part:
            self._streams.pause(state, now)
        self.held.inputs.tell_requests(report, now)
        return report

    def _note_cached(self, state: RequestState, output: SequenceOutput) -> None:
        """Correct what a continued request costs by what the server says."""
        num_lost = self._streams.lost_tokens(state, output)
        self.recompute.note_lost(state.tier.name, num_lost, is_part=self._streams[state.id].follows_part)
        is_first = not self._streams[state.id].num_kept  # later ones find what the earlier ones have computed
        if is_first and output.finish_reason is not None and not state.num_cached_tokens:  # or only then
            state.num_cached_tokens = min(output.num_cached_tokens, len(state.request.prompt_token_ids))

    def _note_step(self, seen: SeenStep, now: float) -> None:
        self.held.add_used(seen.used_s)
        self._slow_start.note_step(seen.num_decodes)
        bulk_s = sum(seen.used_s.get(t.name, 0.0) for t in self.held.tiers if not t.is_interactive)
        self._bulk_total_s += bulk_s
        self._precedence.note_step(seen, sum(seen.used_s.values()) - bulk_s, self._step_times.cost())
        report = Report(sequences=seen.sequences, used_s=seen.used_s, planned_s=seen.predicted_s)
        self.held.inputs.tell_step(report, seen.elapsed_s, 0.0, now)

    def end_stream(self, request_id: str, error: UpstreamError, now: float) -> tuple[Report, list[Lease]]:
        """Handle the end of a stream whose request is not finished.

        Return the report, and the leases to give back to the queue: another worker may have a place for the request.
        """
        report, state = Report(), self._table.states.get(request_id)
        if state is None or request_id not in self._streams:
            return report, []
        if isinstance(error, UpstreamBusy):
            goes_back = self._retries.refuse(state, error, now)
            return report, [s.lease for s in self.held.release([state.id])] if goes_back else []
        if isinstance(error, UpstreamLost):
            self._retries.lose(state, error, now)
        else:
            self._forget(state)
            self.held.fail(state, str(error), now, report, code=UPSTREAM_REFUSED)
        self.held.inputs.tell_requests(report, now)
        return report, []

    def note_load(self, load: UpstreamLoad | None, now: float) -> None:
        """Record that the server answers, and what it says of its load."""
        self._retries.settle(is_counted=not self.server.is_down(now))
        self.server.note_load(load)
        if load is not None:
            self.limit.note_load(load, len(self._streams), self._streams.num_queued, now)

    def note_unreachable(self, error: UpstreamError, now: float) -> None:
        """Record that the server did not say its load."""
        self.server.note_unreachable(error, now, is_certain=isinstance(error, UpstreamUnusable))

    def give_back(self, now: float) -> list[Lease]:
        """Release the requests that another worker can serve as well, because the server is down. Return their leases.

        Requests with tokens that can be continued stay: only this worker has them. Those that nobody can continue end.
        """
        if not self.server.is_down(now):
            return []
        held = [s for s in self.held.states if not (s.output_token_ids and self._streams.can_continue(s))]
        ending = self._retries.end_unfinishable(held, self.server.reason)
        return [state.lease for state in self.held.release([s.id for s in held if s not in ending])]

    # -- twice a second ----------------------------------------------------------------------------------------

    def review(self, depths: Mapping[str, int], now: float) -> list[Decision]:
        num_free = 0 if self._precedence.has_traffic else free_places(self.limit.value)
        self.limit.grow(len(self._streams) + num_free, now)
        self._slow_start.review(len(self._streams), now)
        return self.held.review(depths, self.server.kv_usage, self._step_times.model, now)
