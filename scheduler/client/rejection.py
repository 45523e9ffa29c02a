"""Rejections: why a request is not enqueued, and when the client should try again.

All functions are pure: they read no clock and do no I/O. The time to wait is computed from observed or predicted rates,
so that a client that waits for this time finds room.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from scheduler.config import Tier
from scheduler.registry.worker_status import WorkerStatus

MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0  # the openai client does not retry if it is asked to wait longer
RESTART_S = 5.0  # seconds; typical time until a restarted server serves again


class RejectReason(Enum):
    QUEUE_FULL = "queue_full"  # the tier's `queue_limit` is reached: clients sent too many requests
    OVERLOADED = "overloaded"  # a first token would come after the tier's patience, or after its TTFT SLO
    DEADLINE = "deadline"  # the request would end after its deadline
    NO_ENGINE = "no_engine"  # no worker is alive
    DRAINING = "draining"
    # The tier was removed after the request was assigned to it and before the request was enqueued.
    TIER_GONE = "tier_gone"


@dataclass(frozen=True, slots=True)
class Rejected:
    reason: RejectReason
    message: str
    retry_after_s: float
    is_final: bool = False  # True: the request alone is too much, so a retry would fail as well


def queue_full(tier: Tier, depth: int, workers: Iterable[WorkerStatus]) -> Rejected:
    """Return the rejection for a full queue.

    The client may try again when 5 % of the queue is free at the observed drain rate.
    """
    rate = sum(w.tiers[tier.name].finished_per_s for w in workers if tier.name in w.tiers)
    room = max(1.0, 0.05 * tier.queue_limit)
    wait_s = _clamped(room / rate if rate > 0 else MAX_RETRY_S / 4)
    message = f"The {tier.name} tier's queue is full ({depth} waiting, {tier.queue_limit} at most)."
    return Rejected(RejectReason.QUEUE_FULL, f"{message} {_again(wait_s)}", wait_s)


def overloaded(tier: Tier, predicted_s: float) -> Rejected:
    """Return the rejection of a request whose first token is predicted too late, after `predicted_s` seconds.

    The client may try again when the tier opens again.
    """
    limit_s = tier.ttft_limit_s or 0.0
    reopens_s = tier.admission.reopen_at * limit_s
    wait_s = _clamped(predicted_s - reopens_s)
    limit = f"the {'SLO' if tier.admission.predict else 'patience'} is {_text(limit_s)}"
    rule = limit if predicted_s > limit_s else f"the tier opens again at {_text(reopens_s)}"
    message = f"The {tier.name} tier is overloaded: a first token would take about {_text(predicted_s)}, and {rule}."
    return Rejected(RejectReason.OVERLOADED, f"{message} {_again(wait_s)}", wait_s)


def too_late(tier: Tier, predicted_s: float, left_s: float, own_s: float) -> Rejected:
    """Return the rejection of a request that would end after its deadline, which is `left_s` seconds from now.

    `predicted_s` is the predicted time until the request ends, and `own_s` is the part of `predicted_s` that the
    request's own work takes.
    """
    wait_s, is_final = _clamped(predicted_s - left_s), own_s > left_s
    message = (
        f"The {tier.name} tier cannot finish this by its deadline: it would take about {_text(predicted_s)}, "
        f"and {_text(max(0.0, left_s))} are left."
    )
    advice = "The request alone takes longer: ask for a later deadline or fewer tokens." if is_final else _again(wait_s)
    return Rejected(RejectReason.DEADLINE, f"{message} {advice}", wait_s, is_final)


def no_engine() -> Rejected:
    return Rejected(RejectReason.NO_ENGINE, f"No engine is running at the moment. {_again(RESTART_S)}", RESTART_S)


def draining() -> Rejected:
    message = f"The server is shutting down and takes no new requests. {_again(RESTART_S)}"
    return Rejected(RejectReason.DRAINING, message, RESTART_S)


def tier_gone(tier: str) -> Rejected:
    message = f"The {tier} tier was removed just now. A new attempt is served by another tier."
    return Rejected(RejectReason.TIER_GONE, f"{message} {_again(MIN_RETRY_S)}", MIN_RETRY_S)


def _clamped(seconds: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))


def _again(wait_s: float) -> str:
    return f"Try again in {math.ceil(wait_s)} s."


def _text(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
