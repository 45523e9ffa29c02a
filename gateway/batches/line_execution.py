"""Run the lines of one batch that have no result yet, and write each result to the store when its line finishes.

Lines with a result are not run again, so an execution can be stopped at any time and repeated later.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from redis.exceptions import ConnectionError as StoreUnreachable
from redis.exceptions import TimeoutError as StoreSilent

from gateway.batches.input import BatchLine, next_chunk, read_chunks
from gateway.batches.line import LineRunner
from gateway.batches.model import Batch, LineResult
from gateway.batches.store import BatchStore
from scheduler.clock import Clock

log = logging.getLogger(__name__)

RESULTS_PER_WRITE = 256  # maximum results in one write to the store
STOP_AGAIN_S = 0.25  # seconds between two cancellations of a task that has not ended
RETRY_S = 0.2  # seconds between attempts to write results while the store does not answer


async def stop(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel `tasks` and wait until all have ended.

    Tasks that have not ended are cancelled again every `STOP_AGAIN_S` seconds, because a cancellation may get lost. The
    Redis client sends with `asyncio.wait_for`, which may swallow a cancellation before Python 3.12
    (python/cpython#86296).
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=STOP_AGAIN_S)


class LineExecution:
    """One pass over the lines of `batch` that have no result yet. The input is the file `path`.

    `window` limits the lines in flight of all batches of the gateway together. `token` returns the token of the batch's
    lock, or raises `OwnershipLost` if the lock is lost.
    """

    def __init__(
        self,
        batch: Batch,
        path: Path,
        store: BatchStore,
        lines: LineRunner,
        window: asyncio.Semaphore,
        clock: Clock,
        token: Callable[[], str],
    ) -> None:
        self._batch = batch
        self._path = path
        self._store = store
        self._lines = lines
        self._window = window
        self._clock = clock
        self._token = token
        self._finished: list[LineResult] = []  # not in the store yet
        self._has_finished = asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None
        self._in_flight: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None

    async def run(self) -> None:
        """Run the lines until every line has a result or `stop` is called.

        When this returns, all results are in the store.
        """
        feeder = self._feeder = asyncio.create_task(self._feed())
        recorder = asyncio.create_task(self._record_as_they_finish())
        try:
            await asyncio.wait([feeder, recorder], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop([feeder])  # before the lines, because the feeder starts new lines
            await stop([recorder, *self._in_flight])
            # Read before the next line, which may raise: asyncio logs errors of tasks that nobody has read.
            faults = [task.exception() for task in (feeder, recorder) if not task.cancelled()]
            await self._record_finished()
        for fault in filter(None, faults):
            raise fault

    def stop(self) -> None:
        """Make `run` cancel the lines in flight and return."""
        if self._feeder is not None:
            self._feeder.cancel()

    async def _feed(self) -> None:
        """Run the lines that have no result. The window limits how many lines run at the same time."""
        done = await self._store.finished_lines(self._batch.id)
        chunks = read_chunks(self._path)
        while chunk := await next_chunk(chunks):
            for line in chunk:
                if line.number not in done:
                    await self._window.acquire()
                    task = asyncio.create_task(self._run_line(line))
                    self._in_flight.add(task)
                    task.add_done_callback(self._end_line)
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._fault is not None:
            raise self._fault

    async def _run_line(self, line: BatchLine) -> None:
        batch = self._batch
        self._finished.append(await self._lines.run(batch.id, batch.endpoint, line, batch.owner))
        self._has_finished.set()

    def _end_line(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._window.release()
        if not task.cancelled():
            self._fault = task.exception() or self._fault

    async def _record_as_they_finish(self) -> None:
        while True:
            await self._has_finished.wait()
            self._has_finished.clear()
            try:
                await self._record_finished()
            except (StoreUnreachable, StoreSilent) as error:
                log.warning("results of batch %s wait for the store: %s", self._batch.id, error)
                await self._clock.sleep(RETRY_S)
                self._has_finished.set()

    async def _record_finished(self) -> None:
        """Write the finished results to the store.

        After a failed write, its results are sent again. This is harmless, because the store ignores repeated results.
        """
        while group := self._finished[:RESULTS_PER_WRITE]:
            await self._store.record(self._batch.id, group, self._token())
            del self._finished[: len(group)]
