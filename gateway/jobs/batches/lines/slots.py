"""The window of lines in flight: how many lines this gateway runs at the same time, and whose line is next.

Jobs share the window by stride scheduling over tokens. Each free place goes to the key that has used the fewest tokens
for its weight, and among the jobs of this key to the job that has used the fewest. A key or job that comes later starts
level with the others, so that it neither waits for what they have had nor makes up for it. Keys without jobs leave
their part to the others. While jobs are urgent, each place goes to the urgent job that is due first: sharing equally
with jobs that are due later, it would be late for their sake. Knows keys and counts; does not know lines or stores.
Each gateway has its own window, so the shares are those of the jobs that one gateway runs.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

# Number of a job's lines that begin even if the window is full, so that a small job begins at once beside a large one
# whose lines take long. All jobs together may exceed the window by its own size.
HEAD_START = 4
FIRST_TOKENS = 256.0  # tokens that a line is expected to use, until the first line of any job has ended


@dataclass(frozen=True, slots=True)
class KeyShare:
    """What a key may have of the window: a weight among keys, and a limit of lines in flight (None: no limit)."""

    weight: int = 1
    max_lines: int | None = None


ShareOf = Callable[[str | None], KeyShare]
UrgentDue = Callable[[], float]  # when an urgent job is due, in any unit; inf while it is not urgent


@dataclass(slots=True, eq=False)
class _Key:
    """The jobs of one key. `used` is what they have used in tokens, divided by the key's weight."""

    name: str | None
    used: float
    in_flight: int = 0
    jobs: "list[JobShare]" = field(default_factory=list)


@dataclass(slots=True)
class _Ended:
    """The lines that have ended, and the tokens that they have used."""

    lines: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.lines += 1
        self.tokens += tokens

    def mean(self, default: float) -> float:
        return self.tokens / self.lines if self.lines else default


class JobShare:
    """The share of one job, which has more lines to run until it leaves."""

    def __init__(self, window: "LineWindow", key: _Key, used: float, urgent_due: UrgentDue) -> None:
        self._window = window
        self.urgent_due = urgent_due
        self.key = key
        self.used = used  # tokens
        self.in_flight = 0  # places that the job has been given, and whose lines have not ended
        self.num_begun = 0  # places that the job has been given since it joined
        self.ended = _Ended()
        self.given: deque[float] = deque()  # places that no line has taken yet: the tokens that each was charged
        self.has_given = asyncio.Event()

    async def occupy(self) -> float:
        """Wait for a place for a line, and occupy it. Return the tokens that it was charged, for `free`."""
        while not self.given:
            self.has_given.clear()
            await self.has_given.wait()
        return self.given.popleft()

    def free(self, charged: float, used_tokens: int | None) -> None:
        """Free the place of a line that has ended. It has used `used_tokens` tokens; None: it was stopped."""
        self._window.free(self, charged, used_tokens)

    def leave(self) -> None:
        """Get no more places. Those with lines stay counted until these end."""
        self._window.leave(self)


class Room:
    """The memory that lines in flight may have together, in bytes. They get their parts in the order of their calls."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._free = num_bytes
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold `num_bytes` during the block; wait until they are free. More than the total counts as the total."""
        held = min(num_bytes, self._num_bytes)
        async with self._turn:
            while self._free < held:
                self._freed.clear()
                await self._freed.wait()
            self._free -= held
        try:
            yield
        finally:
            self._free += held
            self._freed.set()


class LineWindow:
    """The window of one gateway. `size` returns its number of places, `share_of` what a key may have of them now.

    Large lines, which would take much memory, also need a part of `room`, which has `room_bytes`.
    """

    def __init__(
        self, size: Callable[[], int], share_of: ShareOf = lambda name: KeyShare(), room_bytes: int = 2**28
    ) -> None:
        self._read_size = size
        self._size = size()
        self._share_of = share_of
        self.room = Room(room_bytes)
        self._in_flight = 0
        self._ended = _Ended()  # of all jobs
        self._keys: dict[str | None, _Key] = {}

    def join(self, owner: str | None, urgent_due: UrgentDue = lambda: math.inf) -> JobShare:
        """Return the share of a new job of the key `owner`. `urgent_due` says how urgent its next line is."""
        key = self._keys.setdefault(owner, _Key(owner, 0.0))
        if not key.jobs:
            others = (k.used for k in self._keys.values() if k.jobs and not self._is_at_limit(k))
            key.used = max(key.used, min(others, default=0.0))
        job = JobShare(self, key, used=min((other.used for other in key.jobs), default=0.0), urgent_due=urgent_due)
        key.jobs.append(job)
        self._give()
        return job

    def leave(self, job: JobShare) -> None:
        job.key.jobs.remove(job)
        while job.given:
            self._count(job, -1, -job.given.popleft())
        self._forget_if_idle(job.key)
        self._give()

    def free(self, job: JobShare, charged: float, used_tokens: int | None) -> None:
        if used_tokens is not None:
            job.ended.add(used_tokens)
            self._ended.add(used_tokens)
        self._count(job, -1, (used_tokens or 0) - charged)
        self._forget_if_idle(job.key)
        self._give()

    def _give(self) -> None:
        """Give all free places to jobs."""
        self._size = self._read_size()
        while (job := self._next()) is not None:
            charged = job.ended.mean(self._ended.mean(FIRST_TOKENS))
            self._count(job, 1, charged)
            job.num_begun += 1
            job.given.append(charged)
            job.has_given.set()

    def _next(self) -> JobShare | None:
        """Return the job that gets the next place; None if none may have it."""
        jobs = [job for key in self._keys.values() for job in key.jobs if self._may_have_more(job)]
        return min(jobs, key=lambda job: (job.urgent_due(), job.key.used, job.used), default=None)

    def _may_have_more(self, job: JobShare) -> bool:
        if self._is_at_limit(job.key):
            return False
        return self._in_flight < self._size or (job.num_begun < HEAD_START and self._in_flight < 2 * self._size)

    def _is_at_limit(self, key: _Key) -> bool:
        limit = self._share_of(key.name).max_lines
        return limit is not None and key.in_flight >= limit

    def _count(self, job: JobShare, places: int, tokens: float) -> None:
        self._in_flight += places
        job.in_flight += places
        job.key.in_flight += places
        job.used += tokens
        job.key.used += tokens / self._share_of(job.key.name).weight

    def _forget_if_idle(self, key: _Key) -> None:
        if not key.jobs and not key.in_flight:
            self._keys.pop(key.name, None)
