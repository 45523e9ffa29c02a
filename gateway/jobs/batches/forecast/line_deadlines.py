"""Deadlines of a batch's lines, so that each line's own deadline says how urgent the whole batch is.

The scheduler sees a few hundred lines of a batch, and thousands wait here. Line i of those that are left is therefore
due when the work behind it must begin, and the work of other batches that are due sooner:

    deadline = end of the window − time to write the files
               − (lines behind it) · (seconds a line) − its own time − work of batches that are due sooner

While a batch is on schedule, this is far away. When it needs the engine from now on, the next line is due at once, and
lines become urgent before that, by the tier's key `urgent_ms`, within an eighth of the window. Of urgent batches, the
one that is due first goes first; one that is late in any case would hold up the others, and does not. The module is
pure.
"""

import math
from dataclasses import dataclass

from gateway.jobs.batches.model import Batch
from scheduler.request import JobDeadline

# The part of the window in which lines become more and more urgent before their deadlines. It is bounded by the tier's
# `urgent_ms`, but the hour of the shipped tiers.yaml is too long for a batch that has a quarter of an hour in all.
URGENT_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class LineTimes:
    """How long lines take: `line_s` from the end of one to the end of the next, `own_s` from its begin to its end.

    `sooner_s` is the time of the work that is left of batches that are due sooner or at the same time. `least_line_s`
    is the least time of a line, with the whole engine.
    """

    line_s: float = 0.0
    own_s: float = 0.0
    sooner_s: float = 0.0
    least_line_s: float = 0.0


class LineDeadlines:
    """The deadlines of the lines of one run of a batch, in the order in which the lines begin."""

    def __init__(self, batch: Batch) -> None:
        """`batch` is the record at the begin of the run: lines that have ended then are not begun again."""
        self._due_ms = int(1000 * batch.lines_due_s)
        self._urgent_ms = max(1, int(1000 * URGENT_SHARE * batch.window_s))
        self._num_left = batch.total - batch.completed - batch.failed

    def begin(self) -> int:
        """Return the number of lines behind the one that begins now."""
        self._num_left = max(0, self._num_left - 1)
        return self._num_left

    def deadline(self, num_behind: int, times: LineTimes, now_ms: int) -> JobDeadline:
        """Return the deadline of a line with so many lines behind it. Lines of a batch that is late are due now."""
        needed_ms = int(1000 * (num_behind * times.line_s + times.own_s + times.sooner_s))
        return JobDeadline(max(now_ms, self._due_ms - needed_ms), self._urgent_ms)

    def urgent_due_ms(self, times: LineTimes, now_ms: int, max_urgent_ms: int) -> float:
        """Return when the batch is due if its next line is urgent at once; else inf.

        `max_urgent_ms` is the `urgent_ms` of the tier. A batch whose lines cannot end in time even with the whole
        engine is not urgent any more.
        """
        left_ms = self.deadline(max(0, self._num_left - 1), times, now_ms).at_ms - now_ms
        is_lost = now_ms + 1000 * self._num_left * times.least_line_s > self._due_ms
        return self._due_ms if left_ms < min(self._urgent_ms, max_urgent_ms) and not is_lost else math.inf
