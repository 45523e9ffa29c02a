"""Run one batch to its end. A run starts from the state that is in the store, and keeps nothing from an earlier run.

A run holds the batch's lock and does the work of each state. Every step can be repeated. If a run ends early (crash,
lost lock, closed gateway), the next run can therefore continue the batch, on this gateway or on another one.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from redis.asyncio.lock import Lock
from redis.exceptions import LockError

from gateway.files.storage import ContentLost
from gateway.files.store import FileStore
from gateway.jobs.batches.input.checks import InputRules, LineError
from gateway.jobs.batches.input.lines import input_name, work_folder
from gateway.jobs.batches.input.offload import offload
from gateway.jobs.batches.input.scan import InputScan, scan_input
from gateway.jobs.batches.lines.execution import LineExecution
from gateway.jobs.batches.lines.line import LineRunner
from gateway.jobs.batches.lines.output import BATCH_CANCELLED, BATCH_EXPIRED, write_files
from gateway.jobs.batches.lines.recorder import ResultRecorder
from gateway.jobs.batches.lines.slots import LineWindow
from gateway.jobs.batches.model import Batch, BatchStatus
from gateway.jobs.batches.store import BatchStore, Moved, OwnershipLost
from gateway.jobs.batches.token_quota import TokenQuota
from scheduler.clock import Clock
from scheduler.store.errors import STORE_AWAY

log = logging.getLogger(__name__)

OnEnd = Callable[[Batch], Awaitable[None]]  # is called at least once when a batch is over
LOST_S = 3600  # seconds after the completion window in which an input or results that are missing may still come back
INPUT_DAMAGED = LineError("input_damaged", "The input file is damaged in the server's storage. Upload it again.")
INPUT_LOST = LineError("input_lost", "The server has lost the input of this batch.")


@dataclass(frozen=True, slots=True)
class RunParts:
    """What the runs of all batches of a gateway have in common."""

    store: BatchStore
    files: FileStore
    lines: LineRunner
    window: LineWindow  # limits the lines in flight of all batches together
    quota: TokenQuota
    rules: Callable[[str], InputRules]  # the rules for inputs of an endpoint
    clock: Clock
    on_end: OnEnd


class BatchRun:
    """One run of a batch, which it owns while it holds the batch's lock. `scan` is that of its input, if just made."""

    def __init__(self, batch_id: str, lock: Lock, parts: RunParts, scan: InputScan | None = None) -> None:
        self._id = batch_id
        self._lock = lock
        self._parts = parts
        self._store = parts.store
        self._storage = parts.files.storage
        self._clock = parts.clock
        self._scan = scan
        self._execution: LineExecution | None = None
        self._has_yielded = False
        self._expires_at = 0

    async def run(self) -> None:
        """Run the batch until it is over, another gateway owns it, or it has yielded its turn."""
        structlog.contextvars.bind_contextvars(batch_id=self._id)
        if not await self._lock.acquire():
            await self._store.bound_lock(self._id, self._lock)
            return
        try:
            while not self._has_yielded and (batch := await self._store.get(self._id)) is not None:
                self._expires_at = batch.expires_at
                if batch.status.is_terminal:
                    if await self._clear_up(batch):
                        return
                    continue
                try:
                    await self._advance(batch)
                except ContentLost as error:
                    if self._now_s() < batch.expires_at + LOST_S:
                        raise
                    await self._give_up(batch, error)
        except OwnershipLost:
            log.info(
                "the lock of batch %s was lost: another gateway runs it, or the store was away for too long", self._id
            )
        finally:
            await self._release()

    @property
    def holds_lock(self) -> bool:
        return self._lock.local.token is not None

    async def renew(self) -> bool:
        """Renew the lock, so that its full lifetime begins again. Return False if the lock is lost."""
        try:
            return bool(await self._lock.reacquire())
        except LockError:
            return False

    def yield_turn(self) -> None:
        """End the run soon, so that another batch can run. A later run continues the batch."""
        self._has_yielded = True
        if self._execution is not None:
            self._execution.stop()

    def check(self, status: BatchStatus) -> None:
        """Stop the lines if the batch is not in progress any more, or if its completion window has passed.

        `status` is the status that was just read from the store.
        """
        is_over = status is not BatchStatus.IN_PROGRESS or self._now_s() >= self._expires_at
        if is_over and self._execution is not None:
            self._execution.stop()

    async def _advance(self, batch: Batch) -> None:
        """Do the work of the batch's state. Raises `ContentLost` if the batch's input or results are missing."""
        checksum = None if batch.status is BatchStatus.VALIDATING else batch.input_sha256  # that state checks it itself
        path = await self._storage.fetch(input_name(self._id), checksum)
        match batch.status:
            case BatchStatus.VALIDATING:
                await self._validate(batch, path)
            case BatchStatus.IN_PROGRESS:
                await self._run_lines(batch, path)
                await self._leave_in_progress()
            case BatchStatus.FINALIZING:
                await self._finish(BatchStatus.COMPLETED, batch, None)
            case BatchStatus.CANCELLING:
                await self._cancel(batch, path)

    async def _give_up(self, batch: Batch, error: ContentLost) -> None:
        """End a batch of which something is lost. Results that are left are kept."""
        log.error("batch %s ends, because something of it is lost: %s", self._id, error)
        ids = {}
        with suppress(ContentLost):
            ids = await self._write_files(batch, None)
        is_cancelling = batch.status is BatchStatus.CANCELLING
        await self._move(BatchStatus.CANCELLED if is_cancelling else BatchStatus.EXPIRED, errors=(INPUT_LOST,), **ids)

    async def _scanned(self, batch: Batch, path: Path) -> InputScan:
        scan, self._scan = self._scan, None
        if scan is None:
            scan = await offload(path, scan_input, self._parts.rules(batch.endpoint))
        return scan

    async def _validate(self, batch: Batch, path: Path) -> None:
        scan = await self._scanned(batch, path)
        if batch.input_sha256 not in (None, scan.sha256):
            return await self._move(BatchStatus.FAILED, errors=(INPUT_DAMAGED,))
        errors = scan.errors or await self._parts.quota.reserve(batch, path)
        if errors:
            await self._move(BatchStatus.FAILED, errors=errors)
        else:
            await self._move(BatchStatus.IN_PROGRESS, total=scan.total, model=scan.model)

    async def _run_lines(self, batch: Batch, path: Path) -> None:
        if self._now_s() >= batch.expires_at or self._has_yielded:
            return
        recorder = ResultRecorder(self._id, self._store, self._parts.files, self._clock, self._token)
        self._execution = LineExecution(batch, path, self._store, self._parts.lines, self._parts.window, recorder)
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

    async def _cancel(self, batch: Batch, path: Path) -> None:
        """End a cancelled batch. The lines of one that had not begun are named as well, if its input can be used."""
        if batch.in_progress_at is not None:
            return await self._finish(BatchStatus.CANCELLED, batch, BATCH_CANCELLED)
        scan = await self._scanned(batch, path)
        if scan.errors:
            return await self._move(BatchStatus.CANCELLED)
        ids = await write_files(self._store, self._parts.files, batch, BATCH_CANCELLED)
        await self._move(BatchStatus.CANCELLED, total=scan.total, model=scan.model, **ids)

    async def _finish(self, end: BatchStatus, batch: Batch, unfinished: tuple[str, str] | None) -> None:
        await self._move(end, **await self._write_files(batch, unfinished))

    async def _write_files(self, batch: Batch, unfinished: tuple[str, str] | None) -> dict[str, str]:
        if batch.in_progress_at is None:  # it ends before its input was validated
            return {}
        return await write_files(self._store, self._parts.files, batch, unfinished)

    async def _move(self, target: BatchStatus, **changes: Any) -> None:
        """Move the batch to the state `target`. Raises `OwnershipLost` if this gateway has lost the batch's lock.

        If the batch was cancelled in the meantime, it is not moved. `run` then reads the new state and acts on it.
        """
        token = self._token()
        moved = await self._store.move(self._id, target, self._now_s(), token=token, **changes)
        if moved is Moved.NOT_OWNER:
            raise OwnershipLost(self._id)

    async def _clear_up(self, batch: Batch) -> bool:
        """Wait until the final state of the batch is durable, report it, and remove its results and copy of the input.

        After a crash in between, the end is reported again. If the storage does not answer, `BatchMaintenance` removes
        its contents another day. Return False if the store has lost the final state.
        """
        await self._store.durable()
        if (await self._store.statuses([self._id])).get(self._id) is not batch.status:
            return False
        await self._parts.on_end(batch)
        if not await self._store.forget_work(self._id, self._token(), self._now_s()):
            return False
        await self._storage.remove_folder(work_folder(self._id))
        return True

    async def _release(self) -> None:
        try:
            await self._lock.release()
        except (LockError, *STORE_AWAY):
            log.debug("the lock of batch %s was gone already", self._id)

    def _token(self) -> str:
        token = self._lock.local.token
        if token is None:
            raise OwnershipLost(self._id)
        return token.decode() if isinstance(token, bytes) else str(token)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000
