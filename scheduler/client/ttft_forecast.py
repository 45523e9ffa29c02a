"""Forecasts of a request's wait, computed from the capacity of the workers and the work that waits ahead.

The module reads no clock and does no I/O. A forecast is linear: a fixed number of seconds, plus seconds for each token
and each request ahead. So the queue can compare it with the waiting work at the moment of a put (`AheadLimit`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler.client.fair_order import TokenCosts
from scheduler.client.inflight import TierUsage
from scheduler.config import Tier
from scheduler.queue.base import AheadLimit, Backlog
from scheduler.registry.worker_status import TierCapacity, WorkerStatus
from scheduler.request import Request

STALE_S = 3.0  # seconds; heartbeats come every second, and an older one is not used
MAX_LAG_S = 1.0  # seconds; the time between two reads of the heartbeats
# Upper bound of a request's own work, as a share of its target. Without this bound, a request that is too long for its
# target would never be admitted. With it, the request is admitted if its wait takes no more than the other half.
MAX_OWN_SHARE = 0.5

# Shares of the waits that may be longer than predicted.
SLO_EXCEEDED_SHARE = 0.01
MEDIAN_EXCEEDED_SHARE = 0.5
STEP_UP = 0.06  # relative rise of the factor after a wait that was longer than predicted
MAX_FACTOR = 4.0  # upper limit of the factor; the lower limit is 1 ÷ MAX_FACTOR


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted time until the first token, or until the end, of requests that are about to be put into the queue."""

    target_s: float  # time in which the first token, or the end, must come
    own_s: float  # predicted time if nothing is ahead
    held_s: float  # time for the work that workers hold already
    prompt_token_s: float  # time for each prompt token that waits ahead
    output_token_s: float  # time for each output token that waits ahead
    slots: float = 0.0  # batch slots of all workers, without the slots that these requests will take
    slots_free: float = 0.0  # the free slots among `slots`
    drain_per_s: float = 0.0  # slots that become free per second; 0: not known, or slots do not limit these requests

    def seconds(self, ahead: Backlog) -> float:
        return self.own_s + self.wait_s(ahead)

    def wait_s(self, ahead: Backlog) -> float:
        waiting_s = ahead.prompt_tokens * self.prompt_token_s + ahead.output_tokens * self.output_token_s
        excess = max(0.0, ahead.requests - self.slots_free)
        slot_s = excess / self.drain_per_s if self.drain_per_s else 0.0
        return max(self.held_s + waiting_s, slot_s)

    def limit(self, above: Sequence[str]) -> AheadLimit:
        """Return the limit that the work ahead must not exceed if the target is to be met.

        `above` names the tiers of higher priority.
        """
        left_s = self.target_s - self.own_s
        max_requests = self.slots_free + self.drain_per_s * left_s if self.drain_per_s else math.inf
        return AheadLimit(max_requests, left_s - self.held_s, self.prompt_token_s, self.output_token_s, tuple(above))

    @property
    def is_complete(self) -> bool:
        """Whether the forecast counts everything: own work in full (below its cap), and the wait for a slot."""
        return self.own_s < MAX_OWN_SHARE * self.target_s and self.drain_per_s > 0

    def is_too_long(self, tier: Tier, requests: Sequence[Request]) -> bool:
        """Return whether the prompts take longer than the TTFT SLO by themselves.

        Workers let other requests of the tier pass such prompts.
        """
        slo_ms, tokens = tier.slo.ttft_p99_ms, sum(len(r.prompt_token_ids) for r in requests)
        return slo_ms is not None and 1000 * self.prompt_token_s * tokens > slo_ms

    def slowed(self, factor: float) -> "Forecast":
        """Return a copy of the forecast in which every wait is `factor` times as long."""
        return replace(
            self,
            held_s=factor * self.held_s,
            prompt_token_s=factor * self.prompt_token_s,
            output_token_s=factor * self.output_token_s,
            drain_per_s=self.drain_per_s / factor,
        )

    def behind_own_requests(self) -> "Forecast":
        """Return the forecast for the case that only this gateway's own requests in flight are ahead.

        These requests include the ones that workers hold, so `held_s` is 0 and all slots count as free.
        """
        return replace(self, held_s=0.0, slots_free=self.slots)


def first_token(
    requests: Sequence[Request], capacity: TierCapacity, slots: int, usage: TierUsage, target_s: float
) -> Forecast:
    """Return the forecast for the first token of the last request of `requests` (all of one tier).

    The work of all `requests` counts. `slots` is the number of batch slots of all workers, and `target_s` is the time
    in which the first token must come.
    """
    token_s = (1 - usage.cached_share) / capacity.prefill_tokens_per_s
    own_s = capacity.step_s + token_s * sum(len(r.prompt_token_ids) for r in requests)
    own_slots = min(len(requests), MAX_OWN_SHARE * slots)
    return Forecast(
        target_s=target_s,
        own_s=min(own_s, MAX_OWN_SHARE * target_s),
        held_s=capacity.prompt_tokens * token_s,
        prompt_token_s=token_s,
        output_token_s=0.0,
        slots=slots - own_slots,
        slots_free=capacity.slots_free - own_slots,
        drain_per_s=capacity.drain_per_s,
    )


def completion(
    requests: Sequence[Request], capacity: TierCapacity, usage: TierUsage, left_s: float, *, cap_own_work: bool
) -> Forecast:
    """Return the forecast for the end of the last of `requests` (all of one tier).

    The last request must end within `left_s` seconds. With `cap_own_work`, the requests' own work counts as at most
    `MAX_OWN_SHARE` of `left_s`. This is right for the tier's deadline, because the caller did not choose it. A
    request's output is estimated as the tier's usual share of its `max_tokens`. While this share is not known, outputs
    count as 0 tokens.
    """
    prompt_s = (1 - usage.cached_share) / capacity.prefill_tokens_per_s
    expected = usage.output_share or 0.0
    output_s = expected / capacity.output_tokens_per_s if capacity.output_tokens_per_s else 0.0
    work_s = sum(len(r.prompt_token_ids) * prompt_s + r.sampling.max_tokens * output_s for r in requests)
    longest_s = max(r.sampling.max_tokens for r in requests) * expected * capacity.step_s
    own_s = capacity.step_s + max(work_s, longest_s)
    return Forecast(
        target_s=left_s,
        own_s=min(own_s, MAX_OWN_SHARE * left_s) if cap_own_work else own_s,
        held_s=capacity.prompt_tokens * prompt_s + capacity.output_tokens * output_s,
        prompt_token_s=prompt_s,
        output_token_s=output_s,
    )


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    status: WorkerStatus
    received_s: float  # time at which this gateway first read it
    lag_s: float  # its age at that time


class Heartbeats:
    """The newest heartbeat of each live worker, and its age.

    The clocks of machines differ a little. So a heartbeat that is read for the first time is taken to be between 0 and
    `MAX_LAG_S` old, whatever the clocks say.
    """

    def __init__(self) -> None:
        self._newest: dict[str, _Heartbeat] = {}

    def update(self, workers: Iterable[WorkerStatus], now: float, wall_ms: int) -> None:
        before, self._newest = self._newest, {}
        for status in workers:
            known = before.get(status.worker_id)
            if known is not None and known.status.at_ms == status.at_ms:
                self._newest[status.worker_id] = replace(known, status=status)
            else:
                lag_s = min(MAX_LAG_S, max(0.0, (wall_ms - status.at_ms) / 1000))
                self._newest[status.worker_id] = _Heartbeat(status, now, lag_s)

    def workers(self) -> list[WorkerStatus]:
        return [heartbeat.status for heartbeat in self._newest.values()]

    def capacity(self, tier: str, now: float) -> TierCapacity | None:
        """Return the present capacity for `tier` of all workers together.

        None if there is no worker, if a worker's heartbeat is too old, or if a worker does not know its capacity yet.
        """
        parts = []
        for heartbeat in self._newest.values():
            age_s = now - heartbeat.received_s + heartbeat.lag_s
            status = heartbeat.status.tiers.get(tier)
            if status is None or status.capacity is None or age_s > STALE_S:
                return None
            if not status.capacity.prefill_tokens_per_s:
                return None
            parts.append(_aged(status.capacity, status.batch_size, age_s))
        return _sum(parts) if parts else None

    def token_costs(self, tier: str, now: float) -> TokenCosts:
        """Return the engine time of the tokens of a tier that has all workers; any time where it is not known."""
        capacity = self.capacity(tier, now)
        if capacity is None or not (capacity.whole_prefill_tokens_per_s and capacity.whole_output_tokens_per_s):
            return TokenCosts()
        return TokenCosts(1000 / capacity.whole_prefill_tokens_per_s, 1000 / capacity.whole_output_tokens_per_s)

    def slots(self, tier: str) -> int:
        """Return the batch slots of all workers for `tier`."""
        statuses = [worker.tiers.get(tier) for worker in self.workers()]
        return sum(status.batch_size for status in statuses if status is not None)


def _aged(capacity: TierCapacity, slots: int, age_s: float) -> TierCapacity:
    """Return the capacity of a worker after the work that it has probably done since its heartbeat, `age_s` ago.

    `InFlight` counts the work that the worker has claimed since then.
    """
    computed = int(age_s * capacity.prefill_tokens_per_s)
    return replace(
        capacity,
        prompt_tokens=max(0, capacity.prompt_tokens - computed),
        slots_free=min(slots, int(capacity.slots_free + age_s * capacity.drain_per_s)),
    )


def _sum(parts: Sequence[TierCapacity]) -> TierCapacity:
    """Return the sum of capacities.

    The drain rate is known only if all workers know theirs. The step time is the longest step time of all workers.
    """
    knows_drain = all(part.drain_per_s for part in parts)
    return TierCapacity(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
        step_s=max(part.step_s for part in parts),
        slots_free=sum(part.slots_free for part in parts),
        drain_per_s=sum(part.drain_per_s for part in parts) if knows_drain else 0.0,
        prefill_tokens_per_s=sum(part.prefill_tokens_per_s for part in parts),
        output_tokens_per_s=sum(part.output_tokens_per_s for part in parts),
        whole_prefill_tokens_per_s=sum(part.whole_prefill_tokens_per_s for part in parts),
        whole_output_tokens_per_s=sum(part.whole_output_tokens_per_s for part in parts),
    )


@dataclass(frozen=True, slots=True)
class _Expectation:
    tier: str
    entered_s: float
    own_s: float
    wait_s: float  # predicted wait behind other requests, without the factor
    exceeded_share: float


class ForecastCorrection:
    """The correction of predicted waits by a learned factor: measured ÷ predicted wait, one factor per tier.

    The factor accounts for effects that a prediction cannot know: how workers share the work, and what else a step
    holds. It follows a quantile of the ratio. A limit that is an SLO needs a high quantile, so that few admitted
    requests are late. A limit that is a patience needs the median, so that predictions are right on average. While no
    first token arrives, the factor does not change.
    """

    def __init__(self) -> None:
        self._factors = defaultdict[str, float](lambda: 1.0)
        self._expected: dict[str, _Expectation] = {}

    def factor(self, tier: str) -> float:
        return self._factors[tier]

    def expect(
        self, request_id: str, tier: str, now: float, own_s: float, wait_s: float, exceeded_share: float
    ) -> None:
        """Remember the prediction that the first token comes within `own_s` + factor · `wait_s` seconds.

        The factor settles where a share `exceeded_share` of the first tokens comes later than predicted.
        """
        self._expected[request_id] = _Expectation(tier, now, own_s, wait_s, exceeded_share)

    def first_token(self, request_id: str, now: float) -> None:
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        # It settles where both moves cancel: one wait exceeds the prediction for every 1 ÷ `odds` that do not.
        factor, odds = self._factors[expected.tier], expected.exceeded_share / (1 - expected.exceeded_share)
        is_late = now - expected.entered_s > expected.own_s + factor * expected.wait_s
        factor *= 1 + (STEP_UP if is_late else -STEP_UP * odds)
        self._factors[expected.tier] = min(MAX_FACTOR, max(1 / MAX_FACTOR, factor))

    def forget(self, request_id: str) -> None:
        """Drop the prediction for a request that ended without a first token."""
        self._expected.pop(request_id, None)
