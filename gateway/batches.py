"""The batch service of one gateway: create, look up, list, cancel; and the keeper that runs what is unfinished.

A batch that is created here is started here at once. The keeper renews the locks of running batches, tells them
of cancellation and expiry, and adopts those whose gateway is gone. Knows no HTTP: what a caller did wrong is a
value (`InputProblem`, `NotCancellable`).
"""

import asyncio
import logging
import math
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable
from redis.exceptions import TimeoutError as StoreSilent

from gateway.batch_input import snapshot_input
from gateway.batch_line import Completions, LineRunner
from gateway.batch_record import Batch, BatchStatus
from gateway.batch_runner import BatchRun, stop
from gateway.batch_store import BatchStore, Moved
from gateway.cursor import Page
from gateway.files import ORPHAN_S, FileStore
from scheduler.clock import Clock
from scheduler.config import TierSet

log = logging.getLogger(__name__)

WINDOW_S = 86_400  # the one completion window there is: "24h"
TICK_S = 0.1  # how soon a run learns of a cancellation through another gateway
ADOPT_S = 1.0  # between looks for batches that nobody runs
BROKEN_S = 5.0  # a run that ended with an exception is tried again after this
SWEEP_S = 60.0
ORPHAN_SWEEP_S = 86_400.0  # at the start, and daily


@dataclass(frozen=True, slots=True)
class NewBatch:
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class InputProblem:
    """The batch was not created: its input file cannot be used."""

    message: str


@dataclass(frozen=True, slots=True)
class NotCancellable:
    status: BatchStatus


class BatchService:
    def __init__(
        self,
        redis: Redis,
        files: FileStore,
        completions: Completions,
        tiers: TierSet,
        model_names: Collection[str],
        clock: Clock,
        *,
        max_lines_in_flight: int = 256,
        lock_ttl_s: float = 6.0,
    ) -> None:
        self._store = BatchStore(redis)
        self._files = files
        self._lines = LineRunner(completions, tiers[tiers.batch_tier], clock)
        self._model_names = model_names
        self._clock = clock
        self._window = asyncio.Semaphore(max_lines_in_flight)
        self._lock_ttl_s = lock_ttl_s
        self._directory = files.data_dir / "batches"
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._not_before: dict[str, float] = {}  # runs that broke: when to take them up again

    async def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Stop all runs where they are and give their locks back; the next `start`, anywhere, goes on."""
        if self._keeper is not None:
            await stop([self._keeper])
        await stop([task for _, task in self._runs.values()])

    async def create(self, new: NewBatch) -> Batch | InputProblem:
        """The batch's lines are safe from now on: its input has a second name, its record is durable."""
        file = await self._files.get(new.input_file_id)
        if file is None:
            return InputProblem(f"No such File object: {new.input_file_id}")
        if file.purpose != "batch":
            return InputProblem(f"Invalid file purpose: expected 'batch', got '{file.purpose}'.")
        batch = self._new_record(new)
        try:
            directory = self._directory / batch.id
            await asyncio.to_thread(snapshot_input, self._files.path(file.id), directory)
        except FileNotFoundError:  # deleted just now
            return InputProblem(f"No such File object: {new.input_file_id}")
        await self._store.create(batch)
        self._launch(batch.id)
        await self._store.durable()
        return batch

    async def retrieve(self, batch_id: str) -> Batch | None:
        return await self._store.get(batch_id)

    async def list(self, *, after: str | None, limit: int) -> Page[Batch] | None:
        """Newest first. None: the cursor `after` names no batch."""
        return await self._store.page(after=after, limit=limit)

    async def cancel(self, batch_id: str) -> Batch | NotCancellable | None:
        """None: there is no such batch. Cancelling again changes nothing."""
        target = BatchStatus.CANCELLING
        moved = await self._store.move(batch_id, target, self._clock.wall_ms() // 1000)
        batch = await self._store.get(batch_id)
        if batch is None:
            return None
        if moved is Moved.MOVED:
            await self._store.durable()
            if batch_id in self._runs:
                self._runs[batch_id][0].check(batch.status)
            return batch
        return batch if batch.status is BatchStatus.CANCELLED else NotCancellable(batch.status)

    async def counts_by_status(self) -> dict[str, int]:
        """How many batches are in each state, of all gateways."""
        return {status.value: count for status, count in (await self._store.counts_by_status()).items()}

    def _new_record(self, new: NewBatch) -> Batch:
        now_s = self._clock.wall_ms() // 1000
        return Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            completion_window=new.completion_window,
            status=BatchStatus.VALIDATING,
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
            metadata=new.metadata,
            output_expires_after_s=new.output_expires_after_s,
        )

    def _launch(self, batch_id: str) -> None:
        """Run a batch here, unless it runs already; the run ends at once if another gateway has its lock."""
        if batch_id in self._runs:
            return
        run = BatchRun(
            batch_id,
            self._store.owner_lock(batch_id, self._lock_ttl_s),
            self._store,
            self._files,
            self._lines,
            self._window,
            self._model_names,
            self._clock,
            self._directory / batch_id,
        )
        task = asyncio.create_task(run.run(), name=batch_id)
        self._runs[batch_id] = (run, task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        batch_id = task.get_name()
        del self._runs[batch_id]
        self._not_before.pop(batch_id, None)
        if not task.cancelled() and task.exception() is not None:
            self._not_before[batch_id] = self._clock.now() + BROKEN_S
            log.error("batch %s broke; it is taken up again", batch_id, exc_info=task.exception())

    async def _keep(self) -> None:
        duties = (
            _Duty(self._tell_runs, 0.0),
            _Duty(self._renew_locks, self._lock_ttl_s / 3),
            _Duty(self._adopt, ADOPT_S),
            _Duty(self._files.sweep, SWEEP_S),
            _Duty(self._sweep_orphans, ORPHAN_SWEEP_S),
        )
        while True:
            try:
                for duty in duties:
                    await duty.do_if_due(self._clock.now())
            except (StoreUnreachable, StoreSilent) as error:
                log.warning("the store is away: %s", error)
            except Exception:
                log.exception("the batch keeper failed; it goes on")
            await self._clock.sleep(TICK_S)

    async def _tell_runs(self) -> None:
        statuses = await self._store.statuses(list(self._runs))
        for batch_id, status in statuses.items():
            if batch_id in self._runs:
                self._runs[batch_id][0].check(status)

    async def _renew_locks(self) -> None:
        for run, task in list(self._runs.values()):
            if run.holds_lock and not await run.renew():
                task.cancel()

    async def _adopt(self) -> None:
        """Only what this machine has the input of: gateways with data directories of their own leave each
        other's batches alone."""
        now = self._clock.now()
        for batch_id in await self._store.unfinished():
            if now >= self._not_before.get(batch_id, now) and (self._directory / batch_id).exists():
                self._launch(batch_id)

    async def _sweep_orphans(self) -> None:
        """What a crash left on disk: contents without a record, directories of batches that are over."""
        await self._files.sweep_orphans()
        unfinished = set(await self._store.unfinished())
        for directory in self._directory.iterdir():
            age_s = self._clock.wall_ms() / 1000 - directory.stat().st_mtime
            if directory.name not in unfinished and age_s > ORPHAN_S:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


@dataclass(slots=True)
class _Duty:
    """Something the keeper does from time to time; a failed attempt waits for its next turn, too."""

    do: Callable[[], Awaitable[object]]
    period_s: float
    due: float = -math.inf

    async def do_if_due(self, now: float) -> None:
        if now >= self.due:
            self.due = now + self.period_s
            await self.do()
