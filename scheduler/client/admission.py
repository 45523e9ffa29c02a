"""The gate of a gateway: whether requests may be put, as far as their promises can be foretold.

Owner of what was seen of the workers, of what is in flight from here, and of which tiers are closed. A tier whose
promise would be broken closes, and opens again where a part of the promise is kept (`rejection.reopen_at`). Only a
tier itself and those above it count: bulk closes nothing above. Where anything is not known, the gate is open.

Pure: `now` and the wall clock are arguments; the queue is asked by the client.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from scheduler.client import rejection
from scheduler.client.forecast_correction import ForecastCorrection
from scheduler.client.inflight import InFlight
from scheduler.client.rejection import Rejected
from scheduler.client.ttft_forecast import Forecast, Heartbeats, completion, first_token
from scheduler.config import Tier, TierSet
from scheduler.queue.base import AheadLimit, Backlog
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import Request, TokenEvent

WORTH_LEARNING = 0.1  # of a promise: shorter waits say little


class Gate:
    def __init__(self, tiers: TierSet) -> None:
        self._in_flight = InFlight()
        self._heartbeats = Heartbeats()
        self._correction = ForecastCorrection()
        self._closed: set[str] = set()
        self.reconfigure(tiers)

    def reconfigure(self, tiers: TierSet) -> None:
        """Other promises: what was closed by those before is open."""
        order = [tier.name for tier in tiers.by_priority]
        self._above = {name: tuple(order[:n]) for n, name in enumerate(order)}
        self._closed.clear()

    def see(self, workers: Iterable[WorkerStatus], now: float, wall_ms: int) -> None:
        """The newest heartbeats."""
        self._heartbeats.see(workers, now, wall_ms)

    def is_closed(self, tier: str) -> bool:
        return tier in self._closed

    # -- requests ----------------------------------------------------------------------------------------------

    def forecast(self, tier: Tier, requests: Sequence[Request], now: float, wall_ms: int) -> Forecast | None:
        """Of `requests` of `tier`; None where nothing can or shall be foretold."""
        capacity = self._heartbeats.capacity(tier.name, now) if tier.admission.predict else None
        if capacity is None:
            return None
        habits = self._in_flight.habits(tier.name)
        if tier.is_interactive:
            if tier.slo.ttft_p99_ms is None:
                return None
            part = tier.admission.reopen_at if self.is_closed(tier.name) else 1.0
            slots = self._heartbeats.slots(tier.name)
            forecast = first_token(requests, capacity, slots, habits, part * tier.slo.ttft_p99_ms / 1000)
            return forecast.slowed(self._correction.factor(tier.name))
        deadline_ms = min(r.deadline_ms for r in requests)
        is_tiers_own = all(r.deadline_ms >= r.arrival_ms + tier.deadline_ms for r in requests)
        if not is_tiers_own:  # they pass whatever is due later, also of what the workers hold
            prompt_tokens, output_tokens = self._in_flight.due_by(tier.name, deadline_ms)
            capacity = replace(capacity, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        return completion(requests, capacity, habits, (deadline_ms - wall_ms) / 1000, spare=is_tiers_own)

    def limit(self, tier: Tier, forecast: Forecast) -> AheadLimit:
        return forecast.limit(self._above[tier.name])

    def check_local(self, tier: Tier, forecast: Forecast) -> Rejected | None:
        """What this gateway itself has under way may be too much already, whatever the last heartbeats said."""
        mine, local = self._mine(tier), forecast.of_this_gateway()
        if not tier.is_interactive or local.limit(()).admits(mine):
            return None
        return self.refuse(tier, local, mine)

    def refuse(self, tier: Tier, forecast: Forecast, ahead: Backlog) -> Rejected:
        """The requests of `forecast` do not get in behind `ahead`."""
        predicted_s = forecast.seconds(ahead)
        if not tier.is_interactive:
            return rejection.too_late(tier, predicted_s, forecast.promise_s, forecast.own_s)
        self._closed.add(tier.name)
        return rejection.overloaded(tier, predicted_s)

    def admitted(self, tier: Tier) -> None:
        """Requests with a forecast got in: the tier is open."""
        self._closed.discard(tier.name)

    def enter(self, tier: Tier, requests: Sequence[Request], forecast: Forecast | None, now: float) -> None:
        """They are under way from now on."""
        if forecast is not None and tier.is_interactive and forecast.is_whole:
            mine = forecast.of_this_gateway().wait_s(self._mine(tier))
            wait_s = max(forecast.held_s, mine) / self._correction.factor(tier.name)
            if wait_s > WORTH_LEARNING * forecast.promise_s:
                self._correction.expect(requests[-1].id, tier.name, now, forecast.own_s, wait_s)
        self._in_flight.enter(requests, are_passed=forecast is not None and forecast.is_late)

    def hear(self, event: TokenEvent, now: float) -> None:
        self._in_flight.hear(event)
        if event.token_ids:
            self._correction.first_token(event.request_id, now)
        if event.is_last:
            self._correction.forget(event.request_id)

    def leave(self, request_id: str) -> None:
        """It is over, or never got in."""
        self._in_flight.leave(request_id)
        self._correction.forget(request_id)

    # -- what others may see -----------------------------------------------------------------------------------

    def predicted_ttft_s(self, tier: Tier, backlogs: Mapping[str, Backlog], now: float) -> float | None:
        """Of a short request that came now, behind what waits in each tier."""
        forecast = self.forecast(tier, (), now, 0) if tier.is_interactive else None
        if forecast is None:
            return None
        tokens = sum(backlogs[name].prompt_tokens for name in (*self._above[tier.name], tier.name) if name in backlogs)
        ahead = Backlog(backlogs[tier.name].requests, tokens) if tier.name in backlogs else Backlog()
        return max(forecast.seconds(ahead), forecast.of_this_gateway().seconds(self._mine(tier)))

    def _mine(self, tier: Tier) -> Backlog:
        tokens = self._in_flight.unanswered_tokens((*self._above[tier.name], tier.name))
        return Backlog(self._in_flight.num_open(tier.name), tokens)
