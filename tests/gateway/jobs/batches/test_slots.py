"""The window of lines in flight: shares by weight, limits, and no job that waits for ever. In virtual time."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.jobs.batches.lines.slots import JobShare, KeyShare, LineWindow, Room
from scheduler.virtual_time import run_virtual

SIZE = 16
LINE_S = 1.0  # seconds that a line takes, whoever sent it


class Job:
    """A job that runs `lines` lines of `tokens` tokens each, and counts what it has done."""

    def __init__(self, window: LineWindow, owner: str | None, lines: int, tokens: int = 100, line_s: float = LINE_S):
        self.share = window.join(owner)
        self.done = self.peak = 0
        self.first_s: float | None = None
        self._lines, self._tokens, self._line_s = lines, tokens, line_s

    async def run(self) -> float:
        """Return the time at which the job is done."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._lines):
                charged = await self.share.occupy()
                self.first_s = self.first_s if self.first_s is not None else now()
                self.peak = max(self.peak, self.share.in_flight)
                group.create_task(self._line(charged))
            self.share.leave()
        return now()

    async def _line(self, charged: float) -> None:
        await asyncio.sleep(self._line_s)
        self.done += 1
        self.share.free(charged, self._tokens)


def now() -> float:
    return asyncio.get_running_loop().time()


@contextmanager
def running(*jobs: Job) -> Iterator[None]:
    tasks = [asyncio.create_task(job.run()) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


def shares(weights: dict[str | None, int]) -> LineWindow:
    return LineWindow(lambda: SIZE, lambda name: KeyShare(weights.get(name, 1)))


def test_while_a_job_is_urgent_free_places_go_to_urgent_jobs_only() -> None:
    async def run() -> tuple[int, int, int]:
        window = LineWindow(lambda: SIZE)
        large, late = Job(window, "a", 1 << 30), Job(window, "b", 10 * SIZE)
        late.share.urgent_due = lambda: 0.0 if now() >= 3.5 * LINE_S else math.inf
        with running(large, late):
            await asyncio.sleep(5.5 * LINE_S)
            before = large.done
            await asyncio.sleep(3 * LINE_S)
            during = large.done - before
            late.share.urgent_due = lambda: math.inf
            await asyncio.sleep(4 * LINE_S)
            return during, late.share.ended.lines, large.done - before - during

    during, late_done, after = run_virtual(run())
    assert during == 0, "lines that ran have ended, and no others began"
    assert late_done >= 5 * SIZE and after >= SIZE


async def test_room_is_had_in_order_and_never_twice() -> None:
    room, begun, most, held = Room(100), list[int](), 0, 0

    async def one(number: int, num_bytes: int) -> None:
        nonlocal most, held
        async with room.hold(num_bytes):
            begun.append(number)
            held += min(num_bytes, 100)
            most = max(most, held)
            await asyncio.sleep(0)
            held -= min(num_bytes, 100)

    sizes = [60, 60, 10, 500, 30, 30, 30, 100, 1]
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for number, num_bytes in enumerate(sizes):
            group.create_task(one(number, num_bytes))
    assert begun == list(range(len(sizes))) and 60 < most <= 100, "a line that is larger than all of it runs alone"


async def test_room_of_a_line_that_was_stopped_is_free() -> None:
    room = Room(100)
    async with room.hold(100):
        waiting = [asyncio.create_task(_hold(room, 50)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
    async with asyncio.timeout(10):
        await waiting[1]
        await _hold(room, 100)


async def _hold(room: Room, num_bytes: int) -> None:
    async with room.hold(num_bytes):
        await asyncio.sleep(0)


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from((50, 100, 200))), min_size=2, max_size=4))
def test_keys_share_by_weight_in_tokens(keys: list[tuple[int, int]]) -> None:
    async def run() -> list[float]:
        window = shares({f"{i}": weight for i, (weight, _) in enumerate(keys)})
        jobs = [Job(window, f"{i}", 1 << 30, tokens) for i, (_, tokens) in enumerate(keys)]
        with running(*jobs):
            await asyncio.sleep(200.5 * LINE_S)
        return [job.done * tokens / weight for job, (weight, tokens) in zip(jobs, keys, strict=True)]

    levels = run_virtual(run())
    assert max(levels) <= min(levels) + 2 * SIZE * 256, "they differ by less than two windows, whatever the time"


def test_the_jobs_of_a_key_share_its_part_equally() -> None:
    async def run() -> list[int]:
        window = shares({"one": 1, "two": 1})
        jobs = [Job(window, owner, 1 << 30) for owner in ("one", "one", "one", "two")]
        with running(*jobs):
            await asyncio.sleep(600.5 * LINE_S)
        return [job.done for job in jobs]

    *same, other = run_virtual(run())
    assert max(same) - min(same) <= 3 * SIZE, "all are within the first windows, in which nothing had ended yet"
    assert other == pytest.approx(sum(same), rel=0.05)


@given(st.sampled_from(("large", "other")), st.integers(1, 3))
def test_a_small_job_begins_at_once_beside_a_large_one(owner: str, lines: int) -> None:
    async def run() -> tuple[float, float | None, float]:
        window = LineWindow(lambda: SIZE)
        with running(Job(window, "large", 50_000, line_s=1000.0)):
            await asyncio.sleep(5.25)
            begins_s, small = now(), Job(window, owner, lines)
            return begins_s, small.first_s, await small.run()

    begins_s, _, ends_s = run_virtual(run())
    assert ends_s == begins_s + LINE_S


def test_a_newcomer_gets_no_more_than_its_share_of_what_follows() -> None:
    async def run() -> tuple[int, int]:
        window = shares({})
        old, new = Job(window, "old", 1 << 30), Job(window, "new", 1 << 30)
        new.share.leave()
        with running(old):
            await asyncio.sleep(100.5 * LINE_S)
            before, late = old.done, Job(window, "new", 1 << 30)
            with running(late):
                await asyncio.sleep(100 * LINE_S)
                return old.done - before, late.done

    old, late = run_virtual(run())
    assert late == pytest.approx(old, rel=0.1)


def test_a_key_has_no_more_lines_in_flight_than_its_limit() -> None:
    async def run() -> tuple[int, int, int]:
        limits = {"limited": KeyShare(1, max_lines=3)}
        window = LineWindow(lambda: SIZE, lambda name: limits.get(name or "", KeyShare()))
        jobs = [Job(window, owner, 1 << 30) for owner in ("limited", "limited", "free")]
        with running(*jobs):
            await asyncio.sleep(50.5 * LINE_S)
            return jobs[0].done + jobs[1].done, sum(job.share.in_flight for job in jobs[:2]), jobs[2].peak

    done, in_flight, free = run_virtual(run())
    assert (done, in_flight) == (150, 3), "the limit is used, and not exceeded"
    assert free == SIZE - 3


@given(st.lists(st.sampled_from(("join", "take", "end", "stop", "leave")), max_size=60))
def test_no_place_is_lost(actions: list[str]) -> None:
    """Whatever joins, takes, ends, is stopped and leaves, in the end the whole window is free again."""

    async def run() -> int:
        window = LineWindow(lambda: 8, lambda name: KeyShare(1, max_lines=2 if name == "b" else None))
        joined: list[JobShare] = []
        lines: list[tuple[JobShare, float]] = []
        for number, action in enumerate(actions):
            if action == "join":
                joined.append(window.join("ab"[number % 2]))
            elif action == "take" and joined and joined[number % len(joined)].given:
                share = joined[number % len(joined)]
                lines.append((share, await share.occupy()))
            elif action in ("end", "stop") and lines:
                share, charged = lines.pop(number % len(lines))
                share.free(charged, 7 if action == "end" else None)
            elif action == "leave" and joined:
                joined.pop(number % len(joined)).leave()
        for share in joined:
            share.leave()
        for share, charged in lines:
            share.free(charged, None)
        return window.join("a").in_flight

    assert run_virtual(run()) == 8
