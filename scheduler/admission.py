"""Admission: may this request join its tier's queue, and if not, when should it come back?

Pure: looks at depths and worker heartbeats it is given; reads no clock and does no I/O.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from scheduler.config import Tier
from scheduler.request import WorkerStatus

MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0  # the openai client gives up retrying on anything longer


class RejectReason(Enum):
    QUEUE_FULL = "queue_full"  # this tier's own limit: the client sent too much
    NO_ENGINE = "no_engine"  # no worker is alive to serve anybody
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Rejected:
    reason: RejectReason
    message: str
    retry_after_s: float


def queue_full(tier: Tier, depth: int, workers: Iterable[WorkerStatus]) -> Rejected:
    """The tier's queue is full: come back when the observed drain rate has made a little room."""
    rate = sum(w.tiers[tier.name].finished_per_s for w in workers if tier.name in w.tiers)
    room = max(1.0, 0.05 * tier.queue_limit)
    wait_s = room / rate if rate > 0 else MAX_RETRY_S / 4
    message = f"The {tier.name} tier's queue is full ({depth} waiting, {tier.queue_limit} at most)."
    return Rejected(RejectReason.QUEUE_FULL, message, _clamped(wait_s))


def no_engine() -> Rejected:
    return Rejected(RejectReason.NO_ENGINE, "No engine is running at the moment.", 5.0)


def draining() -> Rejected:
    return Rejected(RejectReason.DRAINING, "The server is shutting down and takes no new requests.", 5.0)


def _clamped(seconds: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))
