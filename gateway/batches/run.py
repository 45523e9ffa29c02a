"""One batch, from wherever the store says it is to its end. Takes no memory from an earlier run.

A run holds the batch's lock and does, state after state, what that state asks for; every step can be repeated,
so that a run that ends anywhere (crash, lost lock, closed gateway) is taken up by the next one, here or on
another gateway. Lines that have a result are never run again.
"""

import asyncio
import logging
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio.lock import Lock
from redis.exceptions import ConnectionError as StoreUnreachable
from redis.exceptions import LockError
from redis.exceptions import TimeoutError as StoreSilent

from gateway.batches.input import BatchLine, input_path, inspect_input, next_chunk, read_chunks
from gateway.batches.line import LineRunner
from gateway.batches.model import Batch, BatchStatus, LineError, LineResult
from gateway.batches.output import BATCH_CANCELLED, BATCH_EXPIRED, write_files
from gateway.batches.store import BatchStore, Moved, OwnershipLost
from gateway.files.store import FileStore
from scheduler.clock import Clock

log = logging.getLogger(__name__)

GROUP = 256  # results written at once
STOP_AGAIN_S = 0.25
LOST_S = 3600  # after its window: whoever has the input may be away for so long
RETRY_S = 0.2  # between attempts to write results while the store is away


async def stop(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel `tasks` and wait for their end. Again and again, where need be: before Python 3.12 `wait_for`,
    through which the Redis client sends, may swallow a cancellation (python/cpython#86296)."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=STOP_AGAIN_S)


class BatchRun:
    """Owner of one batch while its lock holds."""

    def __init__(
        self,
        batch_id: str,
        lock: Lock,
        store: BatchStore,
        files: FileStore,
        lines: LineRunner,
        window: asyncio.Semaphore,
        model_names: Collection[str],
        clock: Clock,
        directory: Path,
        max_line_bytes: int,
    ) -> None:
        self._id = batch_id
        self._lock = lock
        self._store = store
        self._files = files
        self._lines = lines
        self._window = window  # lines in flight, shared by all batches of this gateway
        self._model_names = model_names
        self._clock = clock
        self._directory = directory
        self._max_line_bytes = max_line_bytes
        self._finished: list[LineResult] = []
        self._wake = asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None
        self._in_flight: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._expires_at = 0

    async def run(self) -> None:
        """Until the batch is over or belongs to somebody else."""
        structlog.contextvars.bind_contextvars(batch_id=self._id)
        if not await self._lock.acquire():
            return
        try:
            while (batch := await self._store.get(self._id)) is not None:
                self._expires_at = batch.expires_at
                if batch.status.is_terminal:
                    return await self._clear_up()
                await (self._give_up(batch) if self.is_lost(batch) else self._advance(batch))
        except OwnershipLost:
            log.info("batch %s is run by another gateway now", self._id)
        finally:
            await self._release()

    def is_lost(self, batch: Batch) -> bool:
        """Its input is not here, and whoever has it did not finish the batch in time."""
        return self._now_s() >= batch.expires_at + LOST_S and not input_path(self._directory).exists()

    @property
    def holds_lock(self) -> bool:
        return self._lock.local.token is not None

    async def renew(self) -> bool:
        """Keep the lock for another term. False: it is lost."""
        try:
            return bool(await self._lock.reacquire())
        except LockError:
            return False

    def check(self, status: BatchStatus) -> None:
        """Stop the lines if `status`, fresh from the store, or the time say that they must not go on."""
        over = status is not BatchStatus.IN_PROGRESS or self._now_s() >= self._expires_at
        if over and self._feeder is not None:
            self._feeder.cancel()

    async def _advance(self, batch: Batch) -> None:
        match batch.status:
            case BatchStatus.VALIDATING:
                await self._validate(batch)
            case BatchStatus.IN_PROGRESS:
                await self._run_until_stopped(batch)
                await self._leave_in_progress()
            case BatchStatus.FINALIZING:
                await self._finish(BatchStatus.COMPLETED, batch, None)
            case BatchStatus.CANCELLING:
                await self._finish(BatchStatus.CANCELLED, batch, BATCH_CANCELLED)

    async def _give_up(self, batch: Batch) -> None:
        """Without the input there are no files to write: not even the order of the lines is known."""
        cancelling = batch.status is BatchStatus.CANCELLING
        log.error("the input of batch %s is lost; the batch ends without files", self._id)
        error = LineError("input_lost", "The server has lost the input of this batch.")
        await self._move(BatchStatus.CANCELLED if cancelling else BatchStatus.EXPIRED, errors=(error,))

    async def _validate(self, batch: Batch) -> None:
        path = input_path(self._directory)
        report = await asyncio.to_thread(
            inspect_input, path, batch.endpoint, self._model_names, max_line_bytes=self._max_line_bytes
        )
        if report.errors:
            await self._move(BatchStatus.FAILED, errors=report.errors)
        else:
            await self._move(BatchStatus.IN_PROGRESS, total=report.total, model=report.model)

    async def _leave_in_progress(self) -> None:
        batch = await self._store.get(self._id)
        if batch is None or batch.status is not BatchStatus.IN_PROGRESS:
            return
        if batch.completed + batch.failed == batch.total:
            await self._move(BatchStatus.FINALIZING)
        elif self._now_s() >= batch.expires_at:
            await self._finish(BatchStatus.EXPIRED, batch, BATCH_EXPIRED)

    async def _finish(self, end: BatchStatus, batch: Batch, unfinished: tuple[str, str] | None) -> None:
        ids = {}
        if batch.in_progress_at is not None:  # else it was cancelled before its lines were known
            ids = await write_files(self._store, self._files, batch, self._directory, unfinished)
        await self._move(end, **ids)

    async def _move(self, target: BatchStatus, **changes: Any) -> None:
        """Where the batch was cancelled meanwhile nothing happens: the loop reads its state again."""
        token = self._token()
        moved = await self._store.move(self._id, target, self._now_s(), token=token, **changes)
        if moved is Moved.NOT_OWNER:
            raise OwnershipLost(self._id)

    async def _run_until_stopped(self, batch: Batch) -> None:
        """Returns when every line has a result, or after `check` has stopped them; what was finished by then
        is in the store."""
        if self._now_s() >= batch.expires_at:
            return
        feeder = self._feeder = asyncio.create_task(self._feed(batch))
        recorder = asyncio.create_task(self._record_as_they_finish())
        try:
            await asyncio.wait([feeder, recorder], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._feeder = None
            await stop([feeder])  # first: it adds to those in flight
            await stop([recorder, *self._in_flight])
            await self._record_finished()
        for task in (feeder, recorder):
            if not task.cancelled():
                task.result()

    async def _feed(self, batch: Batch) -> None:
        """Run the lines that have no result yet, as many at once as the window lets."""
        done = await self._store.finished_lines(self._id)
        chunks = read_chunks(input_path(self._directory))
        while chunk := await next_chunk(chunks):
            for line in chunk:
                if line.number not in done:
                    await self._window.acquire()
                    task = asyncio.create_task(self._run_line(batch, line))
                    self._in_flight.add(task)
                    task.add_done_callback(self._land)
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._fault is not None:
            raise self._fault

    async def _run_line(self, batch: Batch, line: BatchLine) -> None:
        self._finished.append(await self._lines.run(batch.id, batch.endpoint, line, batch.owner))
        self._wake.set()

    def _land(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._window.release()
        if not task.cancelled():
            self._fault = task.exception() or self._fault

    async def _record_as_they_finish(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._record_finished()
            except (StoreUnreachable, StoreSilent) as error:
                log.warning("results of batch %s wait for the store: %s", self._id, error)
                await self._clock.sleep(RETRY_S)
                self._wake.set()

    async def _record_finished(self) -> None:
        """Results leave the list only after the store has them: interrupted in between they are sent again,
        which changes nothing."""
        while group := self._finished[:GROUP]:
            await self._store.record(self._id, group, self._token())
            del self._finished[: len(group)]

    async def _clear_up(self) -> None:
        """The end is on disk before what it was made from goes."""
        await self._store.durable()
        await self._store.forget_work(self._id, self._token())
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _release(self) -> None:
        try:
            await self._lock.release()
        except (LockError, StoreUnreachable, StoreSilent):
            log.debug("the lock of batch %s was gone already", self._id)

    def _token(self) -> str:
        token = self._lock.local.token
        if token is None:
            raise OwnershipLost(self._id)
        return token.decode() if isinstance(token, bytes) else str(token)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000
