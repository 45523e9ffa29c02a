"""Keep the batches of one gateway running: start runs, renew locks, adopt batches that no gateway runs, clear up.

A gateway runs up to `MAX_RUNS` batches at the same time, which gateway/jobs/batches/turns.py chooses. Batches that wait
for their turn keep their states.

There are three loops. The first loop looks after the runs every `TICK_S` seconds. The second loop removes leftovers,
and the third one counts the batches that will be late. They are separate because they may take long, and must not delay
the renewal of locks.
"""

import asyncio
import contextvars
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from gateway.files.disk import is_disk_full
from gateway.files.local_storage import PRIVATE_DIR
from gateway.files.marker import ForeignStorage
from gateway.files.storage import BATCHES, ContentLost, StorageUnreachable
from gateway.files.store import MAX_ORPHANS, ORPHAN_S, SWEEP_GROUP, FileStore
from gateway.jobs.batches.input.lines import work_folder
from gateway.jobs.batches.lines.execution import stop
from gateway.jobs.batches.model import BatchStatus
from gateway.jobs.batches.run import BatchRun
from gateway.jobs.batches.store import BatchStore
from gateway.jobs.batches.turns import UnfinishedBatch, next_turns
from scheduler.clock import Clock
from scheduler.store.errors import STORE_AWAY

log = logging.getLogger(__name__)

# Batches of a gateway that run at the same time. A run holds some lines that wait for places, and costs the store some
# commands each second. So many more may end at the same time, which takes little time and memory.
MAX_RUNS = 64
TICK_S = 0.1  # maximum seconds until a run learns that its batch was cancelled through another gateway
ADOPT_S = 1.0  # seconds between two searches for batches that no gateway runs
BROKEN_S = 5.0  # seconds before a run that ended with an exception is started again
SWEEPER_TICK_S = 1.0  # seconds between two checks whether a sweep or a count is due
LATE_S = 30.0  # seconds between two counts of the batches that will be late
SWEEP_S = 60.0  # seconds between two sweeps of expired files and records of batches
ORPHAN_SWEEP_S = 86_400.0  # seconds between two sweeps of orphans; the first sweep is at the start

MakeRun = Callable[[str], BatchRun]


class BatchMaintenance:
    """The owner of all batch runs of one gateway."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        make_run: MakeRun,
        clock: Clock,
        lock_ttl_s: float,
        count_late: Callable[[], Awaitable[object]],
        ttl_s: int,
        model_names: Collection[str],
    ) -> None:
        """`count_late` counts the batches that will be late, for the metrics. Records live `ttl_s` after the end.

        Lines run of batches for one of `model_names` only.
        """
        self._store = store
        self._files = files
        self._make_run = make_run
        self._clock = clock
        self._storage = files.storage
        self._directory = files.data_dir / BATCHES  # one subdirectory for each batch whose input is on this machine
        self._lock_ttl_s = lock_ttl_s
        self._count_late = count_late
        self._ttl_s = ttl_s
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._withdrawn: dict[str, str | None] = {}  # by id: the owners of batches that are to be removed
        self._scan_cursor = 0  # where in the store the search for ended batches without a date goes on
        self._model_names = model_names
        self._foreign: set[str] = set()  # ids of batches whose model is not served here, which the log has named
        self._not_before: dict[str, float] = {}  # by batch id: the time to start a broken run again

    async def start(self) -> None:
        self._directory.mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
        running = (
            _Duty(self._check_runs, 0.0),
            _Duty(self._renew_locks, self._lock_ttl_s / 3),
            _Duty(self._adopt, ADOPT_S),
            _Duty(self._remove_withdrawn, ADOPT_S),
        )
        sweeping = (
            _Duty(self._files.sweep, SWEEP_S),
            _Duty(self.remove_ended, SWEEP_S),
            _Duty(self.sweep_orphans, ORPHAN_SWEEP_S),
            _Duty(self.warn_of_lost_data, SWEEP_S),
            _Duty(self._warn_of_no_log, math.inf),
        )
        counting = (_Duty(self._count_late, LATE_S),)
        loops = ((running, TICK_S), (sweeping, SWEEPER_TICK_S), (counting, SWEEPER_TICK_S))
        self._loops = [asyncio.create_task(self._perform(duties, tick_s)) for duties, tick_s in loops]

    async def close(self) -> None:
        """Stop all runs and release their locks.

        A gateway with the same storage continues the batches: another one that is running, or this one when it is
        started again.
        """
        await stop(self._loops)
        await stop([task for _, task in self._runs.values()])

    def launch_if_room(self, batch_id: str) -> None:
        """Start to run a new batch at once, if it need not wait for its turn."""
        if len(self._runs) < MAX_RUNS:
            self._launch(batch_id)

    def _launch(self, batch_id: str) -> None:
        """Start to run a batch, unless this gateway already runs it.

        The run ends at once if another gateway holds the batch's lock.
        """
        if batch_id in self._runs:
            return
        run = self._make_run(batch_id)
        # A new context, because log lines of the run must not name the request that created the batch.
        task = asyncio.create_task(run.run(), name=batch_id, context=contextvars.Context())
        self._runs[batch_id] = (run, task)
        task.add_done_callback(self._on_end)

    async def withdraw(self, batch_id: str, owner: str | None) -> None:
        """Remove a batch that was not accepted after all. If the store takes no writes now, its record goes later."""
        self._withdrawn[batch_id] = owner
        with suppress(*STORE_AWAY):  # a storage that does not answer, too: then its orphans go later
            await self._storage.remove_folder(work_folder(batch_id))
        with suppress(*STORE_AWAY):
            await self._remove_withdrawn()

    def check(self, batch_id: str, status: BatchStatus) -> None:
        """Tell the run of a batch that the store has `status` for this batch.

        This has no effect if this gateway does not run the batch.
        """
        if batch_id in self._runs:
            self._runs[batch_id][0].check(status)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        batch_id = task.get_name()
        del self._runs[batch_id]
        self._not_before.pop(batch_id, None)
        fault = None if task.cancelled() else task.exception()
        if fault is None:
            return
        self._not_before[batch_id] = self._clock.now() + BROKEN_S
        if isinstance(fault, (*STORE_AWAY, ContentLost)) or is_disk_full(fault):
            log.warning("batch %s waits: %s", batch_id, fault)
        else:
            log.error("the run of batch %s failed; it is started again", batch_id, exc_info=fault)

    async def _perform(self, duties: "tuple[_Duty, ...]", tick_s: float) -> None:
        while True:
            for duty in duties:
                try:
                    await duty.do_if_due(self._clock.now())
                except StorageUnreachable as error:
                    log.warning("%s", error)
                except STORE_AWAY as error:
                    log.warning("the store does not answer: %s", error)
                except Exception:
                    log.exception("the maintenance of batches failed; it goes on")
            await self._clock.sleep(tick_s)

    async def _check_runs(self) -> None:
        for batch_id, status in (await self._store.statuses(list(self._runs))).items():
            self.check(batch_id, status)

    async def _renew_locks(self) -> None:
        for run, task in list(self._runs.values()):
            if run.holds_lock and not await run.renew():
                task.cancel()

    async def _adopt(self) -> None:
        """Start to run the unfinished batches whose turn it is, and end runs whose batches have to wait again."""
        batches, now_s = await self._unfinished(), self._clock.wall_ms() / 1000
        batches.sort(key=lambda batch: batch.id not in self._runs)  # of equal turns, those of runs come first
        self._foreign &= {batch.id for batch in batches}
        with_lines = [batch for batch in batches if batch.has_lines(now_s) and self._is_served(batch)]
        turns, ending = next_turns(with_lines, MAX_RUNS), {batch.id for batch in batches if not batch.has_lines(now_s)}
        for batch in with_lines:
            if batch.id in self._runs and batch.id not in turns:
                self._runs[batch.id][0].yield_turn()
        self._launch_up_to(MAX_RUNS, ending, self._runs.keys() & ending)
        self._launch_up_to(MAX_RUNS, turns, self._runs.keys() - ending)

    def _is_served(self, batch: UnfinishedBatch) -> bool:
        """Return whether lines of the batch can run here. They would fail, one by one, if its model is not served."""
        if batch.model is None or batch.model in self._model_names:
            return True
        if batch.id not in self._foreign:
            self._foreign.add(batch.id)
            log.warning("batch %s waits: its model %r is not served here", batch.id, batch.model)
        return False

    async def _unfinished(self) -> list[UnfinishedBatch]:
        """Return the unfinished batches that this gateway runs or may run now: no other one runs them.

        A lock that lives too long is taken for free, because a run shortens it.
        """
        now, lock_ttl_ms = self._clock.now(), 1000 * self._lock_ttl_s
        due = [i for i in await self._store.unfinished() if now >= self._not_before.get(i, now)]
        return [
            batch
            for batch in await self._store.read_unfinished(due)
            if batch.id in self._runs or batch.lock_ms is None or batch.lock_ms > lock_ttl_ms
        ]

    def _launch_up_to(self, limit: int, batch_ids: Iterable[str], running: Collection[str]) -> None:
        """Start to run batches of one kind, up to `limit` together with those of this kind that are `running`."""
        waiting = [batch_id for batch_id in batch_ids if batch_id not in self._runs]
        for batch_id in waiting[: max(0, limit - len(running))]:
            self._launch(batch_id)

    async def _warn_of_no_log(self) -> None:
        if not await self._store.durable():
            log.warning("the store keeps no log on its disk (AOF): if it dies, files and batches are lost")

    async def warn_of_lost_data(self) -> None:
        if await self._files.tie.has_lost_data():
            log.error(
                "the store has lost its data, or is another one: batches, files and usage from before are unknown, and "
                "no gateway starts on it any more. Restore a backup, or run `tidegate adopt` with this gateway's flags"
            )

    async def _remove_withdrawn(self) -> None:
        for batch_id, owner in list(self._withdrawn.items()):
            await self._store.remove(batch_id, owner, if_over=False)
            self._withdrawn.pop(batch_id, None)

    async def remove_ended(self) -> None:
        """Remove the records of batches that ended long ago."""
        now_s = self._clock.wall_ms() // 1000
        self._scan_cursor = await self._store.date_undated_ends(self._scan_cursor, now_s)
        before_s = now_s - self._ttl_s
        while batch_ids := await self._store.ended_before(before_s, SWEEP_GROUP):
            owners = {batch.id: batch.owner for batch in await self._store.get_all(batch_ids)}
            for batch_id in batch_ids:
                await self._store.remove(batch_id, owners.get(batch_id), if_over=False)

    async def sweep_orphans(self) -> None:
        """Remove the leftovers of a crash from the storage, unless it may belong to another store.

        These are file contents without a record, and folders of batches that are over or have no record.
        """
        try:
            marker = await self._files.tie.check()
        except ForeignStorage as fault:
            log.error("nothing is swept: %s", fault)
            return
        before_s = self._clock.wall_ms() / 1000 - ORPHAN_S
        if marker.tied_s > before_s:
            before_s = 0.0
        await self._files.sweep_orphans(before_s)
        await self._sweep_folders(before_s)

    async def _sweep_folders(self, before_s: float) -> None:
        folders = await self._storage.entries(BATCHES)
        unfinished = set(await self._store.unfinished())
        left = [folder for folder in folders if folder.name not in unfinished]
        statuses = await self._store.statuses([folder.name for folder in left])
        over = {batch_id for batch_id, status in statuses.items() if status.is_terminal}
        orphans = [f.name for f in left if f.name not in statuses and f.modified_s < before_s][:MAX_ORPHANS]
        if orphans:
            log.info("removing folders of batches without a record: %s", " ".join(orphans))
        for name in (*over, *orphans):
            await self._storage.remove_folder(work_folder(name))


@dataclass(slots=True)
class _Duty:
    """A task that is done once per period. If it fails, it is not repeated before the next period."""

    do: Callable[[], Awaitable[object]]
    period_s: float
    due: float = -math.inf

    async def do_if_due(self, now: float) -> None:
        if now >= self.due:
            self.due = now + self.period_s
            await self.do()
