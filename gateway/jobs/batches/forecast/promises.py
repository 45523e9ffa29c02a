"""Windows that can be promised to a new batch, beside the promises to others.

Batches that are due sooner go first, and all of them together get what interactive tiers leave. A short window may fall
into their busiest minutes, so a promise for it counts with less than one for a long window. The module is pure;
gateway/jobs/batches/forecast/estimate.py has the numbers that it computes with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gateway.jobs.batches.forecast.estimate import Rates, Work
from scheduler.clock import NEVER_S
from scheduler.registry.worker_status import LEFT_STRETCHES_S

# Share of the engine that is promised, of what interactive tiers leave. The rest is for what the rates leave out: steps
# that end early for arrivals, the begin and end of batches, and places that move from one batch to the next.
PROMISED_SHARE = 0.9
LEAST_SHARE = 0.02  # of the engine; a share of 0 would mean that a batch never ends


@dataclass(frozen=True, slots=True)
class Commitment:
    """A batch that was promised to end in time: the seconds until it is due, and its time with the whole engine."""

    left_s: float
    work_s: float


def earliest_promise_s(work: Work, promised: Sequence[Commitment], rates: Rates) -> float:
    """Return the shortest window that a new batch with this work can be promised.

    A window is judged by the longest stretch of time that fits into it. A longer stretch leaves at least as much of the
    engine, so every longer window can be promised, too.
    """
    work_s, earliest_s = rates.cautious_s(work), NEVER_S
    stretches = pairwise((0, *LEFT_STRETCHES_S[1:], NEVER_S))
    for (begins_s, ends_s), left in zip(stretches, rates.left_shares, strict=True):
        share = max(LEAST_SHARE, PROMISED_SHARE * left)
        earliest_s = max(begins_s, earliest_window_s(work_s, promised, share))
        if earliest_s < ends_s:
            break
    return earliest_s


def earliest_window_s(work_s: float, promised: Iterable[Commitment], share: float = 1.0) -> float:
    """Return the shortest window in which a new batch with `work_s` seconds of work can end, in `share` of the engine.

    Batches that are due sooner go first. The new batch must not break a promise that can still be
    kept, so it may have to be due after that one. A batch that is late even with the whole engine is not considered.
    """
    due = sorted(promised, key=lambda batch: batch.left_s)
    before_s = after_s = 0.0  # work of the batches that go first; the earliest place that breaks no promise
    for batch in due:
        before_s += batch.work_s
        if before_s <= batch.left_s < (before_s + work_s) / share:
            after_s = batch.left_s
    window_s, before_s = max(after_s, work_s / share), 0.0
    for batch in due:
        if batch.left_s > max(window_s, (before_s + work_s) / share):
            break
        before_s += batch.work_s
    return max(window_s, (before_s + work_s) / share)
