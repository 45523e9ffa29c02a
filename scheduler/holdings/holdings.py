"""What a worker holds: the requests that it has claimed, from their claims to their ends. The same for every driver.

`Holdings` owns every `RequestState`. A driver's core decides what is done for them, and says in two functions what it
does when a request comes or is dropped. Knows tiers and tokens; does not know queues, engines or clocks.

No request gets lost. At every instant, accepted = finished + failed + cancelled + released + held + refused but not
reported yet.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.interface import EngineInfo
from engine.step_time.model import StepTimeModel
from scheduler.config import TierSet
from scheduler.control.controller import SLAController
from scheduler.control.knobs import Decision
from scheduler.holdings.claims import reason_against, reason_to_give_up, restored_tokens
from scheduler.holdings.controller_inputs import ControllerInputs
from scheduler.holdings.outputs import OutputHandler
from scheduler.holdings.report import Report
from scheduler.holdings.request_table import RequestTable
from scheduler.holdings.status import CoreStatus, count_by_status
from scheduler.request import UNREADABLE_REQUEST, WORKER_DIED, Claimed, EventKind, Lease, Request
from scheduler.request_state import RequestState, Status


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A request that fails with the next `refuse`. `reason` is a sentence for the user, `code` for programs."""

    state: RequestState
    reason: str
    code: str
    kind: EventKind


class Holdings:
    def __init__(
        self,
        tiers: TierSet,
        engine: EngineInfo,
        controller: SLAController,
        begin: Callable[[RequestState], None],
        drop: Callable[[RequestState], None],
        can_restore: Callable[[Request], bool] = lambda request: True,
        worker_id: str = "",
    ) -> None:
        """`begin` is called with each new request, and `drop` with each that is cancelled or released.

        `can_restore` says whether a request can go on from output tokens. `worker_id` is the worker in receipts.
        """
        self.tiers = tiers.by_priority
        self._tier_of = tiers.tiers
        self._engine = engine
        self._controller = controller
        self._begin = begin
        self._drop = drop
        self._can_restore = can_restore
        self.table = RequestTable(self.tiers)
        self.inputs = ControllerInputs(controller, self.table)
        self.counts: Counter[str] = Counter()  # numbers of requests: accepted, finished, failed, cancelled, released
        self.outputs = OutputHandler(self.table, self.counts, worker_id)
        self.used_s: defaultdict[str, float] = defaultdict(float)  # engine time since the start, by tier
        self._restored_tokens: Counter[str] = Counter()  # output tokens taken from checkpoints, by tier
        self._refused: list[_Refusal] = []

    # -- readings ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.table)

    @property
    def states(self) -> Iterable[RequestState]:
        """The states of all requests that are held."""
        return self.table.states.values()

    @property
    def num_interactive(self) -> int:
        return sum(self.table.count(tier.name) for tier in self.tiers if tier.is_interactive)

    @property
    def num_refused(self) -> int:
        """The number of requests that are refused but not reported yet."""
        return len(self._refused)

    def can_continue(self, state: RequestState) -> bool:
        """Return whether another worker can continue the request from its output tokens."""
        return state.can_continue and self._can_restore(state.request)

    def status(self, step_time: StepTimeModel, now: float) -> CoreStatus:
        """Return a snapshot, without what only the driver knows.

        It looks at all states, so call it twice a second, not in every step.
        """
        return CoreStatus(
            step_cost=step_time.cost(),
            decode_cost=step_time.cost(mixed=False),
            knows_step_times=step_time.is_warm,
            step_time_error=step_time.mean_absolute_error,
            safety=step_time.safety,
            held={tier.name: count_by_status(self.table.of_tier(tier.name)) for tier in self.tiers},
            outputs=self._controller.outputs(now),
            used_s=self.used_s,
            restored_tokens=self._restored_tokens,
            missing_deadlines=self.inputs.missing_deadlines,
        )

    # -- requests that come and go -----------------------------------------------------------------------------

    def accept(self, claimed: Sequence[Claimed], now: float, wall_ms: int) -> None:
        """Accept claimed requests. `now` and `wall_ms` are the same instant on the monotonic and the wall clock.

        A request that is held already only gets the newer fence, unless its gateway has said where it must continue. A
        request that can never be served is refused: `refuse` reports it.
        """
        self.release([item.request.id for item in claimed if item.request.is_delivered_in_parts])
        for item in claimed:
            self.inputs.note_claimed(item.request.tier)
            held = self.table.states.get(item.request.id)
            if held is not None:  # the lease expired, and this worker claimed the request again: use the newer lease
                held.fence = item.fence
                continue
            state = self._new_state(item, now, wall_ms)
            self.counts["accepted"] += 1
            if reason := reason_to_give_up(item, state.tier.retry.max_attempts):
                self.note_refused(state, reason, UNREADABLE_REQUEST if item.unreadable else WORKER_DIED)
            elif reason := reason_against(item.request, self._engine):
                self.note_refused(state, reason)
            else:
                self.table.update(state)
                self._restored_tokens[state.tier.name] += state.num_restored
                self._begin(state)

    def _new_state(self, item: Claimed, now: float, wall_ms: int) -> RequestState:
        request = item.request
        output = restored_tokens(item, self._engine) if self._can_restore(request) else ()
        return RequestState(
            request=request,
            tier=self._tier_of.get(request.tier, self.tiers[-1]),  # its tier may have been removed just now
            fence=item.fence,
            arrived_s=now - max(0, wall_ms - request.arrival_ms) / 1000,
            claimed_s=now,
            attempt=item.attempt,
            output_token_ids=list(output),
            num_restored=len(output),
            num_reported=item.num_received or 0 if output else 0,
        )

    def must_ask(self, item: Claimed) -> bool:
        """Return whether the gateway of a claimed request must say what it has received before the request begins."""
        max_attempts = self._tier_of.get(item.request.tier, self.tiers[-1]).retry.max_attempts
        return item.is_taken_over and not reason_to_give_up(item, max_attempts)

    def note_refused(
        self, state: RequestState, reason: str, code: str = "", kind: EventKind = EventKind.FAILED
    ) -> None:
        """Record that a request fails with the next `refuse`. It is not in the table."""
        self._refused.append(_Refusal(state, reason, code, kind))

    def refuse(self, now: float) -> Report:
        """Fail the refused requests, and return the report on them."""
        report = Report()
        refused, self._refused = self._refused, []
        for refusal in refused:
            self.outputs.fail(refusal.state, refusal.reason, now, report, refusal.kind, refusal.code)
        self.inputs.tell_requests(report, now)
        return report

    def fail(
        self,
        state: RequestState,
        error: str,
        now: float,
        report: Report,
        kind: EventKind = EventKind.FAILED,
        code: str = "",
    ) -> None:
        """End a held request as failed."""
        self.table.remove(state)
        self.outputs.fail(state, error, now, report, kind, code)

    def cancel(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Drop requests that no client waits for. Return the states of those that were held."""
        return self._drop_all(request_ids, "cancelled")

    def release(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Drop unfinished requests that other workers will serve, for example after a lost lease.

        Return the states of the requests that were held.
        """
        return self._drop_all(request_ids, "released")

    def release_all(self) -> list[Lease]:
        """Release all requests, and also those that are refused but not reported yet. Return their leases."""
        refused, self._refused = [refusal.state for refusal in self._refused], []
        for state in refused:
            self._discard(state, "released")
        return [state.lease for state in (*refused, *self.release(list(self.table.states)))]

    def _drop_all(self, request_ids: Iterable[str], counter: str) -> list[RequestState]:
        states = self.table.states
        dropped = [states[request_id] for request_id in dict.fromkeys(request_ids) if request_id in states]
        for state in dropped:
            self.table.remove(state)
            self._drop(state)
            self._discard(state, counter)
        return dropped

    def _discard(self, state: RequestState, counter: str) -> None:
        state.move(Status.CANCELLED)
        self.counts[counter] += 1

    # -- the controller ----------------------------------------------------------------------------------------

    def add_used(self, used_s: Mapping[str, float]) -> None:
        """Add engine time in seconds, by tier."""
        for tier, seconds in used_s.items():
            self.used_s[tier] += seconds

    def review(
        self, depths: Mapping[str, int], kv_usage: float, step_time: StepTimeModel, now: float
    ) -> list[Decision]:
        """Boost urgent requests, let the controller move its knobs, and return the controller's decisions.

        `depths` is the number of requests in the queue, by tier.
        """
        return self.inputs.review(self.tiers, depths, kv_usage, step_time, now)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use new tiers with their SLOs, bounds and min shares. A tier that was removed must not hold requests."""
        self.tiers, self._tier_of = tiers.by_priority, tiers.tiers
        self.table.reconfigure(self._tier_of)
        self._controller.reconfigure(tiers)
