"""Run one batch to its end. A run starts from the state that is in the store, and keeps nothing from an earlier run.

A run holds the batch's lock and does the work of each state. Every step can be repeated. If a run ends early (crash,
lost lock, closed gateway), the next run can therefore continue the batch, on this gateway or on another one.
"""

import asyncio
import logging
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio.lock import Lock
from redis.exceptions import ConnectionError as StoreUnreachable
from redis.exceptions import LockError
from redis.exceptions import TimeoutError as StoreSilent

from gateway.batches.input import input_path, inspect_aside
from gateway.batches.line import LineRunner
from gateway.batches.line_execution import LineExecution
from gateway.batches.model import Batch, BatchStatus, LineError
from gateway.batches.output import BATCH_CANCELLED, BATCH_EXPIRED, write_files
from gateway.batches.store import BatchStore, Moved, OwnershipLost
from gateway.files.store import FileStore
from scheduler.clock import Clock

log = logging.getLogger(__name__)

LOST_S = 3600  # seconds after the completion window in which the gateway that has the input may still come back


class BatchRun:
    """One run of a batch. It owns the batch while it holds the batch's lock."""

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
        self._window = window  # limits the lines in flight of all batches of this gateway together
        self._model_names = model_names
        self._clock = clock
        self._directory = directory
        self._max_line_bytes = max_line_bytes
        self._execution: LineExecution | None = None
        self._expires_at = 0

    async def run(self) -> None:
        """Run the batch until it is over or another gateway owns it."""
        structlog.contextvars.bind_contextvars(batch_id=self._id)
        if not await self._lock.acquire():
            await self._store.bound_lock(self._id, self._lock)
            return
        try:
            while (batch := await self._store.get(self._id)) is not None:
                self._expires_at = batch.expires_at
                if batch.status.is_terminal:
                    return await self._clear_up()
                await (self._give_up(batch) if self.is_lost(batch) else self._advance(batch))
        except OwnershipLost:
            log.info(
                "the lock of batch %s was lost: another gateway runs it, or the store was away for too long", self._id
            )
        finally:
            await self._release()

    def is_lost(self, batch: Batch) -> bool:
        """Whether the batch's input is lost.

        The input of an unfinished batch is lost if it is not on this machine and `LOST_S` seconds have passed since the
        end of the completion window. Until then, another gateway that has the input may still finish the batch.
        """
        return self._now_s() >= batch.expires_at + LOST_S and not input_path(self._directory).exists()

    @property
    def holds_lock(self) -> bool:
        return self._lock.local.token is not None

    async def renew(self) -> bool:
        """Renew the lock, so that its full lifetime begins again. Return False if the lock is lost."""
        try:
            return bool(await self._lock.reacquire())
        except LockError:
            return False

    def check(self, status: BatchStatus) -> None:
        """Stop the lines if the batch is not in progress any more, or if its completion window has passed.

        `status` is the status that was just read from the store.
        """
        is_over = status is not BatchStatus.IN_PROGRESS or self._now_s() >= self._expires_at
        if is_over and self._execution is not None:
            self._execution.stop()

    async def _advance(self, batch: Batch) -> None:
        match batch.status:
            case BatchStatus.VALIDATING:
                await self._validate(batch)
            case BatchStatus.IN_PROGRESS:
                await self._run_lines(batch)
                await self._leave_in_progress()
            case BatchStatus.FINALIZING:
                await self._finish(BatchStatus.COMPLETED, batch, None)
            case BatchStatus.CANCELLING:
                await self._finish(BatchStatus.CANCELLED, batch, BATCH_CANCELLED)

    async def _give_up(self, batch: Batch) -> None:
        """End a batch whose input is lost. No files are written: without the input, the order of lines is unknown."""
        is_cancelling = batch.status is BatchStatus.CANCELLING
        log.error("the input of batch %s is lost; the batch ends without files", self._id)
        error = LineError("input_lost", "The server has lost the input of this batch.")
        await self._move(BatchStatus.CANCELLED if is_cancelling else BatchStatus.EXPIRED, errors=(error,))

    async def _validate(self, batch: Batch) -> None:
        path = input_path(self._directory)
        report = await inspect_aside(path, batch.endpoint, self._model_names, max_line_bytes=self._max_line_bytes)
        if report.errors:
            await self._move(BatchStatus.FAILED, errors=report.errors)
        else:
            await self._move(BatchStatus.IN_PROGRESS, total=report.total, model=report.model)

    async def _run_lines(self, batch: Batch) -> None:
        if self._now_s() >= batch.expires_at:
            return
        path = input_path(self._directory)
        self._execution = LineExecution(batch, path, self._store, self._lines, self._window, self._clock, self._token)
        try:
            await self._execution.run()
        finally:
            self._execution = None

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
        if batch.in_progress_at is not None:  # otherwise the batch was cancelled before its input was validated
            ids = await write_files(self._store, self._files, batch, self._directory, unfinished)
        await self._move(end, **ids)

    async def _move(self, target: BatchStatus, **changes: Any) -> None:
        """Move the batch to the state `target`. Raises `OwnershipLost` if this gateway has lost the batch's lock.

        If the batch was cancelled in the meantime, it is not moved. `run` then reads the new state and acts on it.
        """
        token = self._token()
        moved = await self._store.move(self._id, target, self._now_s(), token=token, **changes)
        if moved is Moved.NOT_OWNER:
            raise OwnershipLost(self._id)

    async def _clear_up(self) -> None:
        """Wait until the final state of the batch is durable, then remove its results and its directory."""
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
