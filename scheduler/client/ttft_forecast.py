"""How long will a request wait? From what the workers say they can do and what waits ahead of it.

Pure. A forecast is a line: seconds for what is certain already, and seconds for each token and request ahead. The queue
compares it with what waits in the very moment of a put (`AheadLimit`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler.client.inflight import TierUsage
from scheduler.queue.base import AheadLimit, Backlog
from scheduler.registry.worker_status import TierCapacity, WorkerStatus
from scheduler.request import Request

STALE_S = 3.0  # heartbeats come every second; one that is so old says nothing about now
LAG_S = 1.0  # between two looks at them
OWN_SHARE = 0.5  # of a promise: what a request needs for itself counts as no more, or none would ever take it in


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of requests about to be put, until what they were promised: a first token, or their end."""

    promise_s: float
    own_s: float  # if nothing were ahead
    held_s: float  # what the workers hold
    prompt_token_s: float  # for each that waits ahead
    output_token_s: float
    slots: float = 0.0  # of all workers, when these requests have theirs
    slots_free: float = 0.0  # of those
    drain_per_s: float = 0.0  # slots that become free; 0: not known, or no matter
    is_late: bool = False  # whatever is ahead: others then pass these requests

    def seconds(self, ahead: Backlog) -> float:
        return self.own_s + self.wait_s(ahead)

    def wait_s(self, ahead: Backlog) -> float:
        waiting_s = ahead.prompt_tokens * self.prompt_token_s + ahead.output_tokens * self.output_token_s
        excess = max(0.0, ahead.requests - self.slots_free)
        slot_s = excess / self.drain_per_s if self.drain_per_s else 0.0
        return max(self.held_s + waiting_s, slot_s)

    def limit(self, above: Sequence[str]) -> AheadLimit:
        """As much ahead as leaves the promise whole."""
        left_s = self.promise_s - self.own_s
        max_requests = self.slots_free + self.drain_per_s * left_s if self.drain_per_s else math.inf
        return AheadLimit(max_requests, left_s - self.held_s, self.prompt_token_s, self.output_token_s, tuple(above))

    @property
    def is_whole(self) -> bool:
        """All that the requests need for themselves is counted."""
        return self.own_s < OWN_SHARE * self.promise_s

    def slowed(self, factor: float) -> "Forecast":
        """The same where every wait takes `factor` times as long."""
        return replace(
            self,
            held_s=factor * self.held_s,
            prompt_token_s=factor * self.prompt_token_s,
            output_token_s=factor * self.output_token_s,
            drain_per_s=self.drain_per_s / factor,
        )

    def of_this_gateway(self) -> "Forecast":
        """The same, to be held against all that this gateway has in flight instead of what waits and is held."""
        return replace(self, held_s=0.0, slots_free=self.slots)


def first_token(
    requests: Sequence[Request], capacity: TierCapacity, slots: int, habits: TierUsage, promise_s: float
) -> Forecast:
    """Of the last of `requests` (of one tier) to get its first token: each of them counts."""
    token_s = (1 - habits.cached_share) / capacity.prefill_tokens_per_s
    own_s = capacity.step_s + token_s * sum(len(r.prompt_token_ids) for r in requests)
    own_slots = min(len(requests), OWN_SHARE * slots)
    return Forecast(
        promise_s=promise_s,
        own_s=min(own_s, OWN_SHARE * promise_s),
        held_s=capacity.prompt_tokens * token_s,
        prompt_token_s=token_s,
        output_token_s=0.0,
        slots=slots - own_slots,
        slots_free=capacity.slots_free - own_slots,
        drain_per_s=capacity.drain_per_s,
        is_late=own_s > promise_s,
    )


def completion(
    requests: Sequence[Request], capacity: TierCapacity, habits: TierUsage, left_s: float, spare: bool
) -> Forecast:
    """Of the last of `requests` (of one tier) to end. `spare`: their own work may count as less, as it may where a
    tier's deadline is not their own wish. Outputs count as long as they usually become, where that is known."""
    prompt_s = (1 - habits.cached_share) / capacity.prefill_tokens_per_s
    expected = habits.output_share or 0.0
    output_s = expected / capacity.output_tokens_per_s if capacity.output_tokens_per_s else 0.0
    work_s = sum(len(r.prompt_token_ids) * prompt_s + r.sampling.max_tokens * output_s for r in requests)
    longest_s = max(r.sampling.max_tokens for r in requests) * expected * capacity.step_s
    own_s = capacity.step_s + max(work_s, longest_s)
    return Forecast(
        promise_s=left_s,
        own_s=min(own_s, OWN_SHARE * left_s) if spare else own_s,
        held_s=capacity.prompt_tokens * prompt_s + capacity.output_tokens * output_s,
        prompt_token_s=prompt_s,
        output_token_s=output_s,
    )


@dataclass(frozen=True, slots=True)
class _Heard:
    status: WorkerStatus
    heard_s: float  # when this gateway first saw it
    lag_s: float  # how old it was then


class Heartbeats:
    """The newest heartbeat of each worker, and how old it is. Clocks of other machines differ a little: one that
    comes for the first time is between none and `LAG_S` old, whatever they say."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def see(self, workers: Iterable[WorkerStatus], now: float, wall_ms: int) -> None:
        before, self._heard = self._heard, {}
        for status in workers:
            heard = before.get(status.worker_id)
            if heard is None or heard.status.at_ms != status.at_ms:
                lag_s = min(LAG_S, max(0.0, (wall_ms - status.at_ms) / 1000))
                heard = _Heard(status, now, lag_s)
            self._heard[status.worker_id] = heard

    def capacity(self, tier: str, now: float) -> TierCapacity | None:
        """Of all workers together, now; None where one of them is silent or does not know yet."""
        parts = []
        for heard in self._heard.values():
            age_s = now - heard.heard_s + heard.lag_s
            status = heard.status.tiers.get(tier)
            if status is None or status.capacity is None or age_s > STALE_S:
                return None
            if not status.capacity.prefill_tokens_per_s:
                return None
            parts.append(_aged(status.capacity, status.batch_size, age_s))
        return _together(parts) if parts else None

    def slots(self, tier: str) -> int:
        statuses = [heard.status.tiers.get(tier) for heard in self._heard.values()]
        return sum(status.batch_size for status in statuses if status is not None)


def _aged(capacity: TierCapacity, slots: int, age_s: float) -> TierCapacity:
    """The worker has gone on since: what it held then has become less. What it took since, `InFlight` knows."""
    computed = int(age_s * capacity.prefill_tokens_per_s)
    return replace(
        capacity,
        prompt_tokens=max(0, capacity.prompt_tokens - computed),
        slots_free=min(slots, int(capacity.slots_free + age_s * capacity.drain_per_s)),
    )


def _together(parts: Sequence[TierCapacity]) -> TierCapacity:
    """Rates add up, as far as all are known; a step is as long as the longest."""
    knows_drain = all(part.drain_per_s for part in parts)
    return TierCapacity(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
        step_s=max(part.step_s for part in parts),
        slots_free=sum(part.slots_free for part in parts),
        drain_per_s=sum(part.drain_per_s for part in parts) if knows_drain else 0.0,
        prefill_tokens_per_s=sum(part.prefill_tokens_per_s for part in parts),
        output_tokens_per_s=sum(part.output_tokens_per_s for part in parts),
    )
