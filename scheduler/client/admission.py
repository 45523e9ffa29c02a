"""Admission control of one gateway: refuses requests that are predicted to wait too long.

Keeps the newest heartbeats of the workers, this gateway's own requests in flight, and the set of closed tiers. An
interactive tier closes when a first token is predicted to come after the tier's limit, which is its patience, or its
TTFT SLO in the strict form (`admission.predict`). The tier opens again when the prediction falls below the share
`admission.reopen_at` of the limit. A bulk request is refused if it is predicted to end after its deadline. Requests
wait only behind requests of their own tier and of tiers of higher priority, so bulk work never closes an interactive
tier. If the data for a prediction is missing, admission refuses no request.

The module is pure: `now` and the wall clock are arguments. The client talks to the queue and passes the queue's reply
to `Admission.settle`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from scheduler.client import rejection
from scheduler.client.affinity import PrefixAffinity
from scheduler.client.fair_order import FairOrder
from scheduler.client.inflight import InFlight
from scheduler.client.rejection import Rejected
from scheduler.client.ttft_forecast import (
    MEDIAN_EXCEEDED_SHARE,
    SLO_EXCEEDED_SHARE,
    Forecast,
    ForecastCorrection,
    Heartbeats,
    completion,
    first_token,
)
from scheduler.config import Tier, TierSet
from scheduler.queue.base import AheadLimit, Backlog, Preference, QueueFull, TooFarBehind
from scheduler.registry.worker_status import TierCapacity, WorkerStatus
from scheduler.request import OWN_REQUESTS, Request, TokenEvent


@dataclass(frozen=True, slots=True)
class Ticket:
    """Requests of one tier that are being put into the queue. They count as in flight."""

    tier: Tier
    requests: Sequence[Request]
    forecast: Forecast | None  # None: no prediction is possible
    ahead: AheadLimit | None  # limit of the work that may wait ahead of `requests` in the queue; None: no limit
    began_s: float
    has_few: bool = False  # the key has so few requests beside others that no other key's may fill the queue for it
    prefer: Preference | None = None  # the workers that would serve the requests for less


class Admission:
    def __init__(self, tiers: TierSet) -> None:
        self._in_flight = InFlight()
        self._fair_orders: defaultdict[str, FairOrder] = defaultdict(FairOrder)  # by bulk tier
        self._heartbeats = Heartbeats()
        self._backlogs: Mapping[str, Backlog] = {}
        self._correction = ForecastCorrection()
        self._affinity = PrefixAffinity()
        self._closed: set[str] = set()
        self._returns = rejection.Returns()
        self.reconfigure(tiers)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use `tiers` from now on. All tiers are opened, because their limits may have changed."""
        self._tiers = tiers
        order = [tier.name for tier in tiers.by_priority]
        self._above = {name: tuple(order[:n]) for n, name in enumerate(order)}
        self._closed.clear()

    def is_closed(self, tier: str) -> bool:
        return tier in self._closed

    # -- requests ----------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Request], now: float, wall_ms: int) -> Ticket | Rejected:
        """Count `requests` (of one tier) as in flight and return their ticket, or return why they are refused.

        This check uses only data of this gateway. If it returns a ticket, the caller puts the requests into the queue
        and passes the reply to `settle`, or calls `forget` for each request.
        """
        tier = self._tiers.tiers.get(requests[0].tier)
        if tier is None:
            return rejection.tier_gone(requests[0].tier)
        forecast = self._forecast(tier, requests, now, wall_ms)
        has_few = self._has_few(tier, requests[0].owner, len(requests))
        if forecast is not None and has_few and tier.is_interactive:
            forecast = forecast.behind_own_requests()  # keys with many make room at the workers
        rejected = self._check_local(tier, forecast, requests, now) if forecast is not None else None
        if rejected is not None:
            return rejected
        requests = self._in_order(tier, requests, has_few=has_few, now=now)
        if forecast is not None:
            self._expect_first_token(tier, requests, forecast, now)
        self._in_flight.add(requests, are_passed=forecast is not None and forecast.is_too_long(tier, requests))
        ahead = forecast.limit(self._above[tier.name]) if forecast is not None else None
        usage = self._in_flight.usage(tier.name)
        prefer = self._affinity.prefer(requests, self._heartbeats.workers(), usage, wall_ms)
        return Ticket(tier, requests, forecast, ahead, now, has_few, prefer)

    def settle(self, ticket: Ticket, reply: QueueFull | TooFarBehind | None) -> Rejected | None:
        """Process the queue's `reply` to the put; None means that the requests are enqueued.

        Return why the requests are refused; None if they are accepted.
        """
        if reply is None:
            if ticket.forecast is not None:
                self._closed.discard(ticket.tier.name)
            return None
        for request in ticket.requests:
            self.forget(request.id)
        if isinstance(reply, QueueFull):
            full = rejection.queue_full(ticket.tier, reply, self._heartbeats.workers())
            return self._of_key(full, ticket.tier, ticket.forecast, ticket.requests) or full
        assert ticket.forecast is not None, "without a forecast, the queue was given no limit to compare with"
        return self._refuse(ticket.tier, ticket.forecast, reply.ahead, ticket.requests, ticket.began_s)

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended or was never enqueued."""
        self._in_flight.remove(request_id)
        for order in self._fair_orders.values():
            order.remove(request_id)
        self._correction.forget(request_id)
        self._affinity.forget(request_id)

    def on_event(self, event: TokenEvent, now: float) -> None:
        """Process an event of one of this gateway's requests."""
        self._in_flight.on_event(event)
        self._affinity.on_event(event)
        for order in self._fair_orders.values():
            order.on_event(event)
        if event.token_ids:
            self._correction.first_token(event.request_id, now)
        if event.is_last:
            self._correction.forget(event.request_id)

    def on_heartbeat(
        self, workers: Iterable[WorkerStatus], backlogs: Mapping[str, Backlog], now: float, wall_ms: int
    ) -> None:
        """Store the newest status of every live worker, and the waiting requests and tokens of each tier."""
        self._heartbeats.update(workers, now, wall_ms)
        self._backlogs = backlogs
        for name, order in self._fair_orders.items():
            if name in backlogs and not backlogs[name].requests and name in self._tiers.tiers:
                order.note_empty(wall_ms + self._tiers.tiers[name].deadline_ms)

    def output_shares(self) -> dict[str, float]:
        """Return the part of `max_tokens` that answers usually take, by tier. A tier without answers has none."""
        usages = {name: self._in_flight.usage(name) for name in self._tiers.tiers}
        return {name: usage.output_share for name, usage in usages.items() if usage.output_share is not None}

    # -- predictions -------------------------------------------------------------------------------------------

    def predicted_ttft_s(self, tier: Tier, backlogs: Mapping[str, Backlog], now: float) -> float | None:
        """Return the predicted TTFT in seconds of a short request that arrives now.

        None if no prediction is possible. `backlogs` holds the waiting requests and tokens of each tier.
        """
        forecast = self._forecast(tier, (), now, 0) if tier.is_interactive else None
        if forecast is None:
            return None
        return forecast.own_s + self._wait_s(forecast, tier, backlogs)

    def _wait_s(
        self, forecast: Forecast, tier: Tier, backlogs: Mapping[str, Backlog], owner: str = "", weight: int = 1
    ) -> float:
        """Return a key's predicted wait behind the requests in `backlogs` or behind this gateway's own requests.

        The longer wait counts: `backlogs` holds the requests of other gateways, and the own requests are up to date.
        Whoever has few requests does not wait behind others' backlogs.
        """
        own_s = forecast.behind_own_requests().wait_s(self._own_requests(tier, owner, weight))
        if self._has_few(tier, owner, 1):
            return own_s
        tiers = (*self._above[tier.name], tier.name)
        tokens = sum(backlogs[name].prompt_tokens for name in tiers if name in backlogs)
        ahead = Backlog(backlogs[tier.name].requests, tokens) if tier.name in backlogs else Backlog()
        return max(forecast.wait_s(ahead), own_s)

    def _forecast(self, tier: Tier, requests: Sequence[Request], now: float, wall_ms: int) -> Forecast | None:
        """Return the forecast for `requests` of `tier`; None if no prediction is possible."""
        capacity = self._heartbeats.capacity(tier.name, now)
        if capacity is None:
            return None
        if tier.is_interactive:
            return self._first_token_forecast(tier, requests, capacity)
        if any(request.urgent_ms for request in requests):
            return None  # the job was admitted as a whole: a part of it that is late is needed all the same
        return self._completion_forecast(tier, requests, capacity, now, wall_ms)

    def _first_token_forecast(self, tier: Tier, requests: Sequence[Request], capacity: TierCapacity) -> Forecast:
        limit_s = math.inf if tier.ttft_limit_s is None else tier.ttft_limit_s
        share = tier.admission.reopen_at if self.is_closed(tier.name) else 1.0
        slots, usage = self._heartbeats.slots(tier.name), self._in_flight.usage(tier.name)
        forecast = first_token(requests, capacity, slots, usage, share * limit_s)
        return forecast.slowed(self._correction.factor(tier.name))

    def _completion_forecast(
        self, tier: Tier, requests: Sequence[Request], capacity: TierCapacity, now: float, wall_ms: int
    ) -> Forecast:
        deadline_ms = min(r.deadline_ms for r in requests)
        has_tier_deadline = all(r.deadline_ms >= r.arrival_ms + tier.deadline_ms for r in requests)
        # With an earlier deadline, the requests overtake all requests that are due later, also those that workers hold,
        # and the steps are as short as they need.
        if not has_tier_deadline:
            prompt_tokens, output_tokens = self._in_flight.due_by(tier.name, deadline_ms)
            above = [self._heartbeats.capacity(name, now) for name in self._above[tier.name]]
            step_s = next((c.step_s for c in reversed(above) if c is not None), capacity.step_s)
            capacity = replace(capacity, prompt_tokens=prompt_tokens, output_tokens=output_tokens, step_s=step_s)
        usage, left_s = self._in_flight.usage(tier.name), (deadline_ms - wall_ms) / 1000
        return completion(requests, capacity, usage, left_s, cap_own_work=has_tier_deadline)

    def _check_local(self, tier: Tier, forecast: Forecast, requests: Sequence[Request], now: float) -> Rejected | None:
        """Return why the requests are refused because of this gateway's own requests in flight; None if they are not.

        This check does not depend on the age of the last heartbeats.
        """
        own = self._own_requests(tier, requests[0].owner, requests[0].weight)
        forecast = forecast.behind_own_requests()
        if not tier.is_interactive or forecast.limit(()).admits(own):
            return None
        return self._refuse(tier, forecast, own, requests, now)

    def _refuse(
        self, tier: Tier, forecast: Forecast, ahead: Backlog, requests: Sequence[Request], now: float
    ) -> Rejected:
        """Return the rejection of requests that would wait behind the work `ahead`.

        If the tier is interactive, close it unless only the key's own requests are in the way, and give the client the
        next place among those that come back.
        """
        predicted_s = forecast.seconds(ahead)
        if not tier.is_interactive:
            return rejection.too_late(tier, predicted_s, forecast.target_s, forecast.own_s)
        rejected, owner = rejection.overloaded(tier, predicted_s), ""
        if (of_key := self._of_key(rejected, tier, forecast, requests)) is not None:
            rejected, owner = of_key, requests[0].owner
        else:
            self._closed.add(tier.name)
        if not forecast.drain_per_s:
            return rejected
        work_s = len(requests) / forecast.drain_per_s
        wait_s = self._returns.next_s(tier.name, owner, now, rejected.retry_after_s, work_s)
        return rejected.in_place(wait_s)

    def _of_key(
        self, rejected: Rejected, tier: Tier, forecast: Forecast | None, requests: Sequence[Request]
    ) -> Rejected | None:
        """Return the rejection that names the key as the cause; None if a key with few requests would wait as well."""
        owner = requests[0].owner
        num_open = self._in_flight.num_open(tier.name, owner)
        if not (owner and tier.is_interactive) or num_open + len(requests) <= OWN_REQUESTS:
            return None
        few = self._own_requests(tier, "", 1)
        if forecast is not None and not forecast.behind_own_requests().limit(()).admits(few):
            return None
        return rejection.of_key(rejected, tier, num_open)

    def _expect_first_token(self, tier: Tier, requests: Sequence[Request], forecast: Forecast, now: float) -> None:
        """Remember the predicted wait, so that it can be compared with the measured wait."""
        if not (tier.is_interactive and forecast.is_complete):
            return
        wait_s = self._wait_s(forecast, tier, self._backlogs, requests[0].owner, requests[0].weight)
        wait_s /= self._correction.factor(tier.name)
        if wait_s > forecast.own_s:  # the measured time of a shorter wait is mostly that of the request's own work
            exceeded_share = SLO_EXCEEDED_SHARE if tier.admission.predict else MEDIAN_EXCEEDED_SHARE
            self._correction.expect(requests[-1].id, tier.name, now, forecast.own_s, wait_s, exceeded_share)

    def _own_requests(self, tier: Tier, owner: str, weight: int) -> Backlog:
        """Return how many of this gateway's open requests of `tier` are ahead of a new one of a key, and their tokens.

        The tokens are those of prompts without a first token, with all those of the tiers above.
        """
        requests, tokens = self._in_flight.ahead(tier.name, owner, weight, OWN_REQUESTS)
        return Backlog(requests, tokens + self._in_flight.unanswered_tokens(self._above[tier.name]))

    def _has_few(self, tier: Tier, owner: str, count: int) -> bool:
        """Return whether a key has few requests with `count` more, and others have more of the tier."""
        mine = self._in_flight.num_open(tier.name, owner)
        return mine + count <= OWN_REQUESTS and mine < self._in_flight.num_open(tier.name)

    def _in_order(self, tier: Tier, requests: Sequence[Request], *, has_few: bool, now: float) -> Sequence[Request]:
        """Return the requests with their places in the queue.

        In a bulk tier, the first few of a key are before all that others have put there. Of the others, one with a
        deadline of its own is before what waits of its key, and as much earlier as its deadline is. The parts of jobs
        have shares of their own.
        """
        if tier.is_interactive:
            return self._in_flight.by_number(tier, requests)
        if requests[0].job_part:
            return requests
        order, costs = self._fair_orders[tier.name], self._heartbeats.token_costs(tier.name, now)
        placed = []
        for request in requests:
            due_ms = request.arrival_ms + tier.deadline_ms
            start_ms = order.place(request, due_ms, costs)
            score_ms = order.now_ms - tier.deadline_ms if has_few else start_ms - due_ms + request.deadline_ms
            placed.append(structs.replace(request, order_ms=score_ms))
        return placed
