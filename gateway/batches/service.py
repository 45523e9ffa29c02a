"""The batch service of one gateway: create, look up, list, cancel; and the keeper that runs what is unfinished.

A batch that is created here is started here at once. The keeper renews the locks of running batches, tells them
of cancellation and expiry, and adopts those whose gateway is gone; beside it the sweeper clears away what is left
over, however long that takes. A batch belongs to the key that made it, and so do its files. Knows no HTTP: what a
caller did wrong is a value (`InputProblem`, `NotCancellable`).
"""

import asyncio
import contextvars
import logging
import math
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable
from redis.exceptions import TimeoutError as StoreSilent

from gateway.batches.input import MAX_LINE_BYTES, snapshot_input
from gateway.batches.line import Completions, LineRunner
from gateway.batches.model import Batch, BatchStatus, NewBatch
from gateway.batches.run import LOST_S, BatchRun, stop
from gateway.batches.store import BatchStore, Moved
from gateway.files.pagination import Page
from gateway.files.store import ORPHAN_S, PRIVATE_DIR, FileStore, older_than
from scheduler.clock import Clock
from scheduler.config import TierSet

log = logging.getLogger(__name__)

TICK_S = 0.1  # how soon a run learns of a cancellation through another gateway
ADOPT_S = 1.0  # between looks for batches that nobody runs
BROKEN_S = 5.0  # a run that ended with an exception is tried again after this
SWEEPER_TICK_S = 1.0
SWEEP_S = 60.0
ORPHAN_SWEEP_S = 86_400.0  # at the start, and daily


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
        max_body_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._store = BatchStore(redis)
        self._files = files
        self._lines = LineRunner(completions, tiers[tiers.batch_tier], clock)
        self._model_names = model_names
        self._clock = clock
        self._window = asyncio.Semaphore(max_lines_in_flight)
        self._lock_ttl_s = lock_ttl_s
        self._max_body_bytes = max_body_bytes
        self._directory = files.data_dir / "batches"
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._maintenance: list[asyncio.Task[None]] = []
        self._not_before: dict[str, float] = {}  # runs that broke: when to take them up again

    async def start(self) -> None:
        self._directory.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
        keeper = (
            _Duty(self._tell_runs, 0.0),
            _Duty(self._renew_locks, self._lock_ttl_s / 3),
            _Duty(self._adopt, ADOPT_S),
        )
        sweeper = (
            _Duty(self._files.sweep, SWEEP_S),
            _Duty(self._end_lost, SWEEP_S),
            _Duty(self._sweep_orphans, ORPHAN_SWEEP_S),
        )
        ticks = ((keeper, TICK_S), (sweeper, SWEEPER_TICK_S))
        self._maintenance = [asyncio.create_task(self._perform(duties, tick_s)) for duties, tick_s in ticks]

    def reconfigure(self, tiers: TierSet) -> None:
        self._lines.reconfigure(tiers[tiers.batch_tier])

    async def close(self) -> None:
        """Stop all runs where they are and give their locks back; the next `start`, anywhere, goes on."""
        await stop(self._maintenance)
        await stop([task for _, task in self._runs.values()])

    async def create(self, new: NewBatch) -> Batch | InputProblem:
        """The batch's lines are safe from now on: its input has a second name, its record is durable."""
        absent = InputProblem(f"No such File object: {new.input_file_id[:200]}")
        file = await self._files.get(new.input_file_id, owner=new.owner)
        if file is None:
            return absent
        if file.purpose != "batch":
            return InputProblem(f"Invalid file purpose: expected 'batch', got '{file.purpose}'.")
        batch = new.to_batch(f"batch_{secrets.token_hex(12)}", self._now_s())
        try:
            directory = self._directory / batch.id
            await asyncio.to_thread(snapshot_input, self._files.path(file.id), directory)
        except FileNotFoundError:  # deleted just now
            return absent
        await self._store.create(batch)
        self._launch(batch.id)
        await self._store.durable()
        return batch

    async def retrieve(self, batch_id: str, *, owner: str | None) -> Batch | None:
        """None: `owner` has no such batch."""
        batch = await self._store.get(batch_id)
        return batch if batch is not None and batch.owner == owner else None

    async def list(self, *, owner: str | None, after: str | None, limit: int) -> Page[Batch] | None:
        """Of `owner`'s batches, newest first. None: the cursor `after` names none of them."""
        return await self._store.page(owner=owner, after=after, limit=limit)

    async def cancel(self, batch_id: str, *, owner: str | None) -> Batch | NotCancellable | None:
        """None: `owner` has no such batch. Cancelling again changes nothing."""
        if await self.retrieve(batch_id, owner=owner) is None:
            return None
        moved = await self._store.move(batch_id, BatchStatus.CANCELLING, self._now_s())
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
            self._max_body_bytes,
        )
        # A context of its own: what it logs is not about the request that created the batch.
        task = asyncio.create_task(run.run(), name=batch_id, context=contextvars.Context())
        self._runs[batch_id] = (run, task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        batch_id = task.get_name()
        del self._runs[batch_id]
        self._not_before.pop(batch_id, None)
        if not task.cancelled() and task.exception() is not None:
            self._not_before[batch_id] = self._clock.now() + BROKEN_S
            log.error("batch %s broke; it is taken up again", batch_id, exc_info=task.exception())

    async def _perform(self, duties: "tuple[_Duty, ...]", tick_s: float) -> None:
        while True:
            for duty in duties:
                try:
                    await duty.do_if_due(self._clock.now())
                except (StoreUnreachable, StoreSilent) as error:
                    log.warning("the store is away: %s", error)
                except Exception:
                    log.exception("the upkeep of batches failed; it goes on")
            await self._clock.sleep(tick_s)

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

    async def _end_lost(self) -> None:
        """Batches of which nobody brought the input back, long after their windows: a run here ends them."""
        missing = [i for i in await self._store.unfinished() if not (self._directory / i).exists()]
        for batch in await self._store.get_all(missing):
            if self._now_s() >= batch.expires_at + LOST_S:
                self._launch(batch.id)

    async def _sweep_orphans(self) -> None:
        """What a crash left on disk: contents without a record, directories of batches that are over."""
        await self._files.sweep_orphans()
        unfinished = set(await self._store.unfinished())
        before_s = self._clock.wall_ms() / 1000 - ORPHAN_S
        everything = await asyncio.to_thread(older_than, math.inf, self._directory)
        left = [directory for directory in everything if directory.name not in unfinished]
        old = set(await asyncio.to_thread(older_than, before_s, self._directory))
        statuses = await self._store.statuses([directory.name for directory in left])
        over = {batch_id for batch_id, status in statuses.items() if status.is_terminal}
        for directory in left:  # one without a record may be that of a batch about to be made
            if directory in old or directory.name in over:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000


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
