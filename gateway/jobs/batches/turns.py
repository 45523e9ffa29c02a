"""Which of the unfinished batches a gateway runs while it has more of them than it runs at the same time.

Half of the turns go to the batches that are due first, and those with a promised window come before best effort, so no
promise waits for a batch without one. The other half go to keys in turn, so that a key with many batches does not hold
up the first batch of another key. The module is pure.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.jobs.batches.model import BatchStatus


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """What decides the turn of a batch. `expires_at` is a Unix time in seconds."""

    id: str
    status: BatchStatus
    owner: str | None
    best_effort: bool
    expires_at: int
    model: str | None  # None: its input has not been read yet
    lock_ms: int | None  # milliseconds until its lock lapses, -1: it never does; None: no gateway runs the batch

    def has_lines(self, now_s: float) -> bool:
        """Return whether lines of the batch may have to run. All that is left of others takes little time."""
        return self.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS) and now_s < self.expires_at


def next_turns(batches: Sequence[UnfinishedBatch], limit: int) -> list[str]:
    """Return the ids of up to `limit` batches that run now. Among equal ones, earlier ones in `batches` go first."""
    by_due = sorted(batches, key=lambda batch: (batch.best_effort, batch.expires_at))
    first, others = by_due[: (limit + 1) // 2], by_due[(limit + 1) // 2 :]
    num_of_key = Counter(batch.owner for batch in first)
    turns: list[tuple[int, str]] = []
    for batch in others:
        turns.append((num_of_key[batch.owner], batch.id))
        num_of_key[batch.owner] += 1
    turns.sort(key=lambda turn: turn[0])  # those of equal turns stay in the order in which they are due
    return [batch.id for batch in first] + [batch_id for _, batch_id in turns[: limit - len(first)]]
