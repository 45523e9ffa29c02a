"""Refusals: why a request may not join its tier's queue, and when to come back.

Pure: looks at what it is given; reads no clock and does no I/O. The wait is what the observed or predicted rate needs,
so that whoever obeys it finds room.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from scheduler.config import Tier
from scheduler.registry.worker_status import WorkerStatus

MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0  # the openai client gives up retrying on anything longer
RESTART_S = 5.0  # until a server that is restarted serves again


class RejectReason(Enum):
    QUEUE_FULL = "queue_full"  # this tier's own limit: the client sent too much
    OVERLOADED = "overloaded"  # the tier's promise of a first token would be broken
    DEADLINE = "deadline"  # it would end after its deadline
    NO_ENGINE = "no_engine"  # no worker is alive to serve anybody
    DRAINING = "draining"
    TIER_GONE = "tier_gone"  # removed between the request's classification and its entry


@dataclass(frozen=True, slots=True)
class Rejected:
    reason: RejectReason
    message: str
    retry_after_s: float
    is_final: bool = False  # it could not be served if nothing else were here: coming back is no use


def queue_full(tier: Tier, depth: int, workers: Iterable[WorkerStatus]) -> Rejected:
    """The tier's queue is full: come back when the observed drain rate has made a little room."""
    rate = sum(w.tiers[tier.name].finished_per_s for w in workers if tier.name in w.tiers)
    room = max(1.0, 0.05 * tier.queue_limit)
    wait_s = _clamped(room / rate if rate > 0 else MAX_RETRY_S / 4)
    message = f"The {tier.name} tier's queue is full ({depth} waiting, {tier.queue_limit} at most)."
    return Rejected(RejectReason.QUEUE_FULL, f"{message} {_again(wait_s)}", wait_s)


def overloaded(tier: Tier, predicted_s: float) -> Rejected:
    """A first token would come after `predicted_s`, too late for what `tier` promises: come back when as much work is
    done as lets it open again."""
    promise_s = (tier.slo.ttft_p99_ms or 0.0) / 1000
    reopens_s = tier.admission.reopen_at * promise_s
    wait_s = _clamped(predicted_s - reopens_s)
    is_late = predicted_s > promise_s
    rule = f"{_spoken(promise_s)} are promised" if is_late else f"the tier opens again at {_spoken(reopens_s)}"
    message = f"The {tier.name} tier is overloaded: a first token would take about {_spoken(predicted_s)}, and {rule}."
    return Rejected(RejectReason.OVERLOADED, f"{message} {_again(wait_s)}", wait_s)


def too_late(tier: Tier, predicted_s: float, left_s: float, own_s: float) -> Rejected:
    """It would end after its deadline, `left_s` from now; `own_s` of `predicted_s` are its own work."""
    wait_s, is_final = _clamped(predicted_s - left_s), own_s > left_s
    message = (
        f"The {tier.name} tier cannot finish this by its deadline: it would take about {_spoken(predicted_s)}, "
        f"and {_spoken(max(0.0, left_s))} are left."
    )
    advice = "Its own work takes longer: ask for a later deadline or fewer tokens." if is_final else _again(wait_s)
    return Rejected(RejectReason.DEADLINE, f"{message} {advice}", wait_s, is_final)


def no_engine() -> Rejected:
    return Rejected(RejectReason.NO_ENGINE, f"No engine is running at the moment. {_again(RESTART_S)}", RESTART_S)


def draining() -> Rejected:
    message = f"The server is shutting down and takes no new requests. {_again(RESTART_S)}"
    return Rejected(RejectReason.DRAINING, message, RESTART_S)


def tier_gone(tier: str) -> Rejected:
    message = f"The {tier} tier was removed just now: asked for again, the request goes to another."
    return Rejected(RejectReason.TIER_GONE, f"{message} {_again(MIN_RETRY_S)}", MIN_RETRY_S)


def _clamped(seconds: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))


def _again(wait_s: float) -> str:
    return f"Try again in {math.ceil(wait_s)} s."


def _spoken(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
