"""Which refused jobs could have ended in time, by what is known after the run.

Each job's real work and the engine time that chats left in each second are known then. A fluid that always flows to the
job that is due first meets all deadlines that any order meets, so a job that is late in this way was refused rightly.
The reverse is not certain, since real steps lose some time: the count of wrong refusals is an upper bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A job with its real work, in seconds of the whole engine. Times are seconds since the load began."""

    at_s: float
    due_s: float
    work_s: float
    admitted: bool


def wrongly_refused(jobs: Sequence[KnownJob], left: Sequence[float]) -> int:
    """Return how many refused jobs would have ended in time, without making those late that were admitted before them.

    `left` is the share of the engine that chats left, in each second.
    """
    return sum(_fits(job, [other for other in jobs if other.admitted and other.at_s < job.at_s], left) for job in jobs)


def _fits(job: KnownJob, before: Sequence[KnownJob], left: Sequence[float]) -> bool:
    if job.admitted:
        return False
    return late([*before, job], left) <= late(before, left)


def late(jobs: Iterable[KnownJob], left: Sequence[float]) -> int:
    """Return how many jobs are late if the one that is due first always gets all that is left."""
    todo = {job: job.work_s for job in jobs}
    for second, share in enumerate(left):
        room_s = share
        for job in sorted((job for job in todo if job.at_s <= second < job.due_s), key=lambda job: job.due_s):
            done_s = min(room_s, todo[job])
            todo[job] -= done_s
            room_s -= done_s
    return sum(work_s > 1e-9 and job.due_s <= len(left) for job, work_s in todo.items())
