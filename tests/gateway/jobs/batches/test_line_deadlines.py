"""Deadlines of lines, which say how urgent the whole batch is."""

import math
from dataclasses import replace

from gateway.jobs.batches.forecast.line_deadlines import LineDeadlines, LineTimes
from gateway.jobs.batches.model import Batch, BatchStatus

HOUR = 3600
NOW_S = 1_000_000
BATCH = Batch(
    "batch_1", "/v1/completions", "f", "1h", BatchStatus.IN_PROGRESS, NOW_S, NOW_S + HOUR, total=100, completed=10
)
TIMES = LineTimes(line_s=2.0, own_s=5.0)


def test_lines_are_due_one_after_the_other_until_the_files_must_be_written() -> None:
    deadlines = LineDeadlines(BATCH)
    due_s = [deadlines.deadline(deadlines.begin(), TIMES, 1000 * NOW_S).at_ms / 1000 for _ in range(90)]
    assert due_s[-1] == NOW_S + HOUR - 60 - TIMES.own_s
    assert {b - a for a, b in zip(due_s, due_s[1:], strict=False)} == {TIMES.line_s}


def test_the_next_line_is_due_now_when_the_rest_needs_all_the_time_that_is_left() -> None:
    deadlines = LineDeadlines(BATCH)
    behind = deadlines.begin()
    needed_s = behind * TIMES.line_s + TIMES.own_s
    last_s = BATCH.lines_due_s - needed_s
    assert deadlines.deadline(behind, TIMES, int(1000 * last_s)).at_ms == int(1000 * last_s)
    late_ms = int(1000 * last_s) + 90_000
    assert deadlines.deadline(behind, TIMES, late_ms).at_ms == late_ms, "late lines are urgent, not lost"


def urgent_due_s(deadlines: LineDeadlines, at_s: float, least_line_s: float = 0.5) -> float:
    times = replace(TIMES, least_line_s=least_line_s)
    return deadlines.urgent_due_ms(times, int(1000 * at_s), max_urgent_ms=10 * HOUR * 1000) / 1000


def test_an_urgent_batch_says_when_it_is_due() -> None:
    deadlines = LineDeadlines(BATCH)
    must_begin_s = BATCH.lines_due_s - 89 * TIMES.line_s - TIMES.own_s
    assert urgent_due_s(deadlines, must_begin_s - 451) == math.inf
    assert urgent_due_s(deadlines, must_begin_s - 449) == urgent_due_s(deadlines, must_begin_s) == BATCH.lines_due_s


def test_a_batch_that_cannot_end_in_time_holds_up_no_other() -> None:
    deadlines = LineDeadlines(BATCH)
    assert urgent_due_s(deadlines, BATCH.lines_due_s - 46) == BATCH.lines_due_s, "90 lines need 45 s at least"
    assert urgent_due_s(deadlines, BATCH.lines_due_s - 44) == math.inf
