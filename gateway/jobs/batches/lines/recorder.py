"""Keep the results of one execution of a batch's lines: write them to the storage, then record them in the store.

Finished lines form a group, which is appended to the storage as a whole and then recorded by one script. If the result
of writing a group is unknown, the same group is written again, which the storage and the store both allow. While the
storage, its disk or the store does not take results, they wait in memory; beyond `BACKLOG_BYTES` of them, the lines
that finish wait, too, and hold their places in the window, so no new lines start.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gateway.files.disk import DiskFull, noticing_full_disk
from gateway.files.store import FileStore
from gateway.jobs.batches.lines.results import encode, results_name
from gateway.jobs.batches.model import LineResult
from gateway.jobs.batches.store import BatchStore
from scheduler.clock import Clock
from scheduler.store.errors import STORE_AWAY

log = logging.getLogger(__name__)

GROUP_LINES, GROUP_BYTES = 500, 2**22  # a group ends when it reaches one of these two sizes
BACKLOG_BYTES = 2**24  # of results that are not recorded
RETRY_S = 0.2  # seconds between attempts to write a group


@dataclass(frozen=True, slots=True)
class _Group:
    results: list[LineResult]
    data: bytes


class ResultRecorder:
    """The results of one execution. `token` returns the token of the batch's lock, or raises `OwnershipLost`."""

    def __init__(
        self, batch_id: str, store: BatchStore, files: FileStore, clock: Clock, token: Callable[[], str]
    ) -> None:
        self._batch_id = batch_id
        self._store = store
        self._storage = files.storage
        self._disk = files.disk
        self._clock = clock
        self._token = token
        self._name = results_name(batch_id, secrets.token_hex(8))
        self._position = 0  # bytes of the content `_name` that are recorded
        self._finished: list[LineResult] = []  # in no group yet
        self._group: _Group | None = None  # not recorded, or its outcome is unknown
        self._unrecorded_bytes = 0
        self._is_draining = False
        self._has_finished = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_due = asyncio.Event()  # the next group does not wait for more results
        self._is_empty = asyncio.Event()
        self._notify()

    async def add(self, result: LineResult) -> None:
        """Take a result, and return when there is room for more of them."""
        self._finished.append(result)
        self._unrecorded_bytes += len(result.text)
        self._notify()
        await self._has_room.wait()

    async def run(self) -> None:
        """Record results until cancelled. Raises `OwnershipLost`."""
        is_waiting = False
        while True:
            await self._has_finished.wait()
            await self._collect()
            try:
                await self._record_group()
                is_waiting = False
            except (*STORE_AWAY, DiskFull) as error:
                if not is_waiting:
                    log.warning("results of batch %s wait: %s", self._batch_id, error)
                is_waiting = True
                await self._clock.sleep(RETRY_S)

    async def drained(self) -> None:
        """Wait until `run` has recorded all results."""
        self._is_draining = True
        self._notify()
        await self._is_empty.wait()

    async def flush(self) -> None:
        """Record all results. What is not recorded after an error stays, and the next call goes on."""
        while not self._is_empty.is_set():
            await self._record_group()

    async def _record_group(self) -> None:
        group = self._group = self._group or self._next_group()
        if self._storage.path(self._name) is not None:  # it is on this machine's disk
            self._disk.check_results(len(group.data))
        with noticing_full_disk():
            await self._storage.append(self._name, self._position, group.data)
        end = self._position + len(group.data)
        await self._store.record(self._batch_id, self._name, self._position, end, group.results, self._token())
        self._position, self._group = end, None
        self._unrecorded_bytes -= sum(len(result.text) for result in group.results)
        self._notify()

    async def _collect(self) -> None:
        """Wait for more results, where each append is costly."""
        if self._storage.collect_s and self._group is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._storage.collect_s):
                    await self._is_due.wait()

    def _next_group(self) -> _Group:
        """Return the next group, and remove its results from those that finished."""
        size = count = 0
        while count < min(GROUP_LINES, len(self._finished)) and size < GROUP_BYTES:
            size += len(self._finished[count].text)
            count += 1
        results, self._finished = self._finished[:count], self._finished[count:]
        return _Group(results, encode(results))

    def _notify(self) -> None:
        """Set the events as the results are."""
        is_empty = self._group is None and not self._finished
        for event, is_set in (
            (self._is_empty, is_empty),
            (self._has_finished, not is_empty),
            (self._has_room, self._unrecorded_bytes < BACKLOG_BYTES),
            (self._is_due, self._is_draining or self._unrecorded_bytes >= GROUP_BYTES),
        ):
            event.set() if is_set else event.clear()
