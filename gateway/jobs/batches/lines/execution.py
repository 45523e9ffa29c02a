"""Run the lines of one batch that have no result yet, and record each result when its line finishes.

Lines begin in the order of gateway/jobs/batches/input/order.py, as the window that all batches share gives them places.
Lines with a result are not run again, so an execution can be stopped at any time and repeated later.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gateway.jobs.batches.input.lines import BatchLine, next_chunk
from gateway.jobs.batches.input.offload import offload
from gateway.jobs.batches.input.order import LargeLine, ensure_order, read_large_line, read_ordered_chunks
from gateway.jobs.batches.lines.line import LineRunner
from gateway.jobs.batches.lines.recorder import ResultRecorder
from gateway.jobs.batches.lines.slots import JobShare, LineWindow
from gateway.jobs.batches.model import Batch
from gateway.jobs.batches.store import BatchStore

STOP_AGAIN_S = 0.25  # seconds between two cancellations of a task that has not ended


async def stop(tasks: Iterable[asyncio.Task[Any]]) -> None:
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


def _read_fault(task: asyncio.Task[None]) -> None:
    """Read the task's error, because asyncio logs errors that nobody has read. A cancelled `run` may not come to it."""
    if not task.cancelled():
        task.exception()


class LineExecution:
    """One pass over the lines of `batch` that have no result yet. The input is the file `path`.

    `window` limits the lines in flight of all batches of the gateway together.
    """

    def __init__(
        self,
        batch: Batch,
        path: Path,
        store: BatchStore,
        lines: LineRunner,
        window: LineWindow,
        recorder: ResultRecorder,
    ) -> None:
        self._batch = batch
        self._path = path
        self._store = store
        self._lines = lines.begin(batch)
        self._window = window
        self._recorder = recorder
        self._feeder: asyncio.Task[None] | None = None
        self._in_flight: set[asyncio.Task[int]] = set()
        self._fault: BaseException | None = None

    async def run(self) -> None:
        """Run the lines until every line has a result or `stop` is called.

        When this returns, all results are recorded.
        """
        feeder = self._feeder = asyncio.create_task(self._feed_and_record())
        recorder = asyncio.create_task(self._recorder.run())
        for task in (feeder, recorder):
            task.add_done_callback(_read_fault)
        try:
            await asyncio.wait([feeder, recorder], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop([feeder])  # before the lines, because the feeder starts new lines
            await stop([recorder, *self._in_flight])
            faults = [task.exception() for task in (feeder, recorder) if not task.cancelled()]
            await self._flush()
        for fault in filter(None, faults):
            raise fault

    async def _flush(self) -> None:
        """Record what has finished, also if this task is cancelled again meanwhile. Raises what `flush` raises."""
        flush = asyncio.create_task(self._recorder.flush())
        while not flush.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([flush])
        flush.result()

    def stop(self) -> None:
        """Make `run` cancel the lines in flight and return."""
        if self._feeder is not None:
            self._feeder.cancel()

    async def _feed_and_record(self) -> None:
        await self._feed()
        await self._recorder.drained()

    async def _feed(self) -> None:
        """Run the lines that have no result. The window limits how many lines run at the same time."""
        done = await self._store.finished_lines(self._batch.id)
        await offload(self._path, ensure_order, self._batch.total)
        chunks = read_ordered_chunks(self._path, done)
        share = self._window.join(self._batch.owner, self._lines.urgent_due)
        try:
            while chunk := await next_chunk(chunks):
                for line in chunk:
                    charged = await share.occupy()
                    task = asyncio.create_task(self._run_line(line))
                    self._in_flight.add(task)
                    task.add_done_callback(partial(self._end_line, share, charged))
        finally:
            share.leave()
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._fault is not None:
            raise self._fault

    async def _run_line(self, line: BatchLine | LargeLine) -> int:
        """Run a line, and return the tokens that the engine has computed for it."""
        if isinstance(line, BatchLine):
            return await self._run_read_line(line)
        async with self._window.room.hold(line.num_bytes):
            return await self._run_read_line(await read_large_line(self._path, line))

    async def _run_read_line(self, line: BatchLine) -> int:
        result = await self._lines.run(line)
        await self._recorder.add(result)
        return result.input_tokens - result.cached_tokens + result.output_tokens

    def _end_line(self, share: JobShare, charged: float, task: asyncio.Task[int]) -> None:
        self._in_flight.discard(task)
        has_ended = not task.cancelled() and task.exception() is None
        share.free(charged, task.result() if has_ended else None)
        if not task.cancelled():
            self._fault = task.exception() or self._fault
