"""Rejections: why a request is not enqueued, and when the client should try again.

All functions are pure: they read no clock and do no I/O. The time to wait is computed from observed or predicted rates,
so that a client that waits for this time finds room. Clients that are refused together would come back together, and
most of them would be refused again: so each rejection also has a spread, over which `at` distributes their returns.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from scheduler.config import Tier
from scheduler.queue.base import QueueFull
from scheduler.registry.worker_status import WorkerStart, WorkerStatus

MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0  # the openai client does not retry if it is asked to wait longer
RESTART_S = 5.0  # seconds; typical time until a restarted server serves again


class RejectReason(Enum):
    QUEUE_FULL = "queue_full"  # the tier's `queue_limit` is reached: clients sent too many requests
    OVERLOADED = "overloaded"  # a first token would come after the tier's patience, or after its TTFT SLO
    KEY_LIMIT = "key_limit"  # the key's own open requests are in the way: one with few would be admitted
    DEADLINE = "deadline"  # the request would end after its deadline
    NO_ENGINE = "no_engine"  # no worker is alive
    DRAINING = "draining"
    # The tier was removed after the request was assigned to it and before the request was enqueued.
    TIER_GONE = "tier_gone"


# Reasons for which the request is served in the lower tier of `admission.demote_to`, if there is one.
DEMOTES = frozenset({RejectReason.OVERLOADED, RejectReason.KEY_LIMIT})


@dataclass(frozen=True, slots=True)
class Rejected:
    reason: RejectReason
    message: str
    retry_after_s: float
    spread_s: float = 0.0  # time over which the work ahead ends, beginning at `retry_after_s`
    is_final: bool = False  # True: the request alone is too much, so a retry would fail as well

    def at(self, share: float) -> "Rejected":
        """Return the rejection for a client that comes back at `share` of the spread, from 0 to 1.

        No client comes back earlier than after half of the wait. Waits that would be longer than clients accept are
        spread over the second half of the longest wait.
        """
        latest_s = min(MAX_RETRY_S, self.retry_after_s + self.spread_s)
        earliest_s = min(self.retry_after_s, max(MAX_RETRY_S / 2, latest_s - self.spread_s))
        return replace(self, retry_after_s=earliest_s + share * (latest_s - earliest_s), spread_s=0.0)

    def in_place(self, wait_s: float) -> "Rejected":
        """Return the rejection for a client whose place among those that come back is in `wait_s` seconds."""
        return replace(self, retry_after_s=min(wait_s, MAX_RETRY_S), spread_s=MIN_RETRY_S)

    @property
    def advice(self) -> str:
        """The sentence that says when to try again; empty if a retry would fail as well."""
        return "" if self.is_final else f"Try again in {math.ceil(self.retry_after_s)} s."


class Returns:
    """When clients that were refused come back: one after the other, at the rate at which the tier takes requests.

    Clients that come back at random within the time of the work ahead would meet each other's work, which is not in
    the queue yet. A place is advice: nothing is kept free for those that do not come back.
    """

    def __init__(self) -> None:
        self._free_s: dict[tuple[str, str], float] = {}  # by tier and key: the time behind the last place

    def next_s(self, tier: str, owner: str, now: float, earliest_s: float, work_s: float) -> float:
        """Return the seconds until the next place, at least `earliest_s`. It takes the tier `work_s` seconds.

        A key whose own requests are in the way (`owner`) has places of its own, so that others do not come back behind
        them. Places end with the longest wait that clients accept; then they begin anew.
        """
        free_s = self._free_s.get((tier, owner), 0.0)
        place_s = max(now + earliest_s, free_s if free_s < now + MAX_RETRY_S else 0.0)
        self._free_s[tier, owner] = place_s + work_s
        return place_s - now


def queue_full(tier: Tier, full: QueueFull, workers: Iterable[WorkerStatus]) -> Rejected:
    """Return the rejection for a full queue.

    The client may try again when 5 % of the queue is free at the observed drain rate.
    """
    depth, limit = full.depth, full.limit
    rate = sum(w.tiers[tier.name].finished_per_s for w in workers if tier.name in w.tiers)
    room = max(1.0, 0.05 * (limit if full.num_bytes is None else depth))
    message = f"The {tier.name} tier's queue is full ({depth} waiting, {limit} at most)."
    if full.num_bytes is not None:
        sizes = f"{full.num_bytes / 2**20:.0f} MB waiting, {limit / 2**20:.0f} MB at most"
        message = f"The {tier.name} tier's queue is full ({sizes}, in {depth} requests)."
    if rate <= 0:
        return _rejected(RejectReason.QUEUE_FULL, message, MAX_RETRY_S / 4)
    return _rejected(RejectReason.QUEUE_FULL, message, room / rate, depth / rate)


def overloaded(tier: Tier, predicted_s: float) -> Rejected:
    """Return the rejection of a request whose first token is predicted too late, after `predicted_s` seconds.

    The client may try again when the tier opens again.
    """
    limit_s = tier.ttft_limit_s or 0.0
    reopens_s = tier.admission.reopen_at * limit_s
    limit = f"the {'SLO' if tier.admission.predict else 'patience'} is {_text(limit_s)}"
    rule = limit if predicted_s > limit_s else f"the tier opens again at {_text(reopens_s)}"
    message = f"The {tier.name} tier is overloaded: a first token would take about {_text(predicted_s)}, and {rule}."
    return _rejected(RejectReason.OVERLOADED, message, predicted_s - reopens_s, predicted_s)


def of_key(rejected: Rejected, tier: Tier, num_open: int) -> Rejected:
    """Return the rejection of a request whose key has `num_open` open ones, where other keys would be admitted."""
    message = f"The {tier.name} tier has no room for another request of this API key, which has {num_open} open."
    return replace(rejected, reason=RejectReason.KEY_LIMIT, message=message)


def too_late(tier: Tier, predicted_s: float, left_s: float, own_s: float) -> Rejected:
    """Return the rejection of a request that would end after its deadline, which is `left_s` seconds from now.

    `predicted_s` is the predicted time until the request ends, and `own_s` is the part of `predicted_s` that the
    request's own work takes.
    """
    message = (
        f"The {tier.name} tier cannot finish this by its deadline: it would take about {_text(predicted_s)}, "
        f"and {_text(max(0.0, left_s))} are left."
    )
    if own_s <= left_s:
        return _rejected(RejectReason.DEADLINE, message, predicted_s - left_s, predicted_s)
    message += " The request alone takes longer: ask for a later deadline or fewer tokens."
    return replace(_rejected(RejectReason.DEADLINE, message, predicted_s - left_s), is_final=True)


def no_engine(starting: Sequence[WorkerStart] = ()) -> Rejected:
    """Return the rejection of a request that no engine can serve. `starting` are the workers that start."""
    message = "No engine is running at the moment."
    if starting:
        message = f"No engine is ready yet: a worker is {starting[0].phase}, for {_text(starting[0].seconds)} so far."
    return _rejected(RejectReason.NO_ENGINE, message, RESTART_S)


def no_task_worker() -> Rejected:
    message = "No worker with a static endpoint is running: start one with `tidegate worker --engine static`."
    return _rejected(RejectReason.NO_ENGINE, message, RESTART_S)


def draining() -> Rejected:
    message = "The server is shutting down and takes no new requests."
    return _rejected(RejectReason.DRAINING, message, RESTART_S)


def tier_gone(tier: str) -> Rejected:
    message = f"The {tier} tier was removed just now. A new attempt is served by another tier."
    return _rejected(RejectReason.TIER_GONE, message, MIN_RETRY_S)


def _rejected(reason: RejectReason, message: str, wait_s: float, backlog_s: float = 0.0) -> Rejected:
    """Return a rejection with a wait that clients accept.

    `backlog_s` is the time that the work ahead takes. The spread is at least as long as the wait itself.
    """
    wait_s = min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))
    return Rejected(reason, message, wait_s, max(wait_s, backlog_s))


def _text(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
