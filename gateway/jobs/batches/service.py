"""The batch service of one gateway: creates, looks up, lists and cancels batches.

The gateway that creates a batch also starts to run it at once. gateway/jobs/batches/maintenance.py looks after the
runs. A batch and its files belong to the API key that created the batch. Does not know HTTP: a mistake of the caller is
returned as a value (`InputProblem`, `Infeasible`, `TooManyBatches`, `NotCancellable`).
"""

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from redis.asyncio import Redis

from gateway.dead_letters import DeadLetters
from gateway.files.disk import noticing_full_disk
from gateway.files.pagination import Page
from gateway.files.storage import ContentLost, StorageUnreachable
from gateway.files.store import FileStore, content_name
from gateway.http.trace import CURRENT_TRACE
from gateway.identity import Keyring
from gateway.jobs.batches.forecast.forecasts import BatchForecasts, FindModel, Infeasible
from gateway.jobs.batches.forecast.line_statistics import LineStatistics
from gateway.jobs.batches.input.checks import InputRules
from gateway.jobs.batches.input.lines import input_name
from gateway.jobs.batches.input.offload import offload
from gateway.jobs.batches.input.scan import InputScan, scan_input
from gateway.jobs.batches.lines.line import BatchTracer, Completions, LineRunner
from gateway.jobs.batches.lines.slots import KeyShare, LineWindow
from gateway.jobs.batches.maintenance import BatchMaintenance
from gateway.jobs.batches.model import Batch, BatchStatus, NewBatch
from gateway.jobs.batches.run import BatchRun, OnEnd, RunParts
from gateway.jobs.batches.store import BatchStore, Moved
from gateway.jobs.batches.token_quota import CountTokens, TokenQuota
from gateway.protocol.json_body import MAX_BODIES
from scheduler.clock import Clock
from scheduler.store.durability import LOST
from scheduler.store.errors import NotDurable

LOCK_TTL_S = 6.0  # seconds for which a batch stays locked by a gateway that has died
MIN_WINDOW = 256  # lines of all batches of a gateway that run at the same time, with the smallest fleet
# With a larger one: lines for each slot of the live workers. One gateway's batches must be able to fill them all, and a
# slot that becomes free needs a line that waits.
LINES_A_SLOT = 1.25
_CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class InputProblem:
    """The reason why a batch was not created: its input file cannot be used."""

    message: str


@dataclass(frozen=True, slots=True)
class TooManyBatches:
    """The owner of a new batch has so many unfinished batches that it gets no more."""

    limit: int


@dataclass(frozen=True, slots=True)
class NotCancellable:
    status: BatchStatus


def _window_size(least: int, num_slots: Callable[[], int]) -> int:
    return max(least, ceil(LINES_A_SLOT * num_slots()))


def _traced(on_end: OnEnd, tracer: BatchTracer) -> OnEnd:
    async def end(batch: Batch) -> None:
        await on_end(batch)
        if batch.traceparent is not None:
            tracer.end(batch)

    return end


class BatchService:
    """The service that creates, runs, lists and cancels the batches of one gateway.

    `max_lines` is the limit of one batch, and `max_unfinished` that of the unfinished batches of one key. `on_end` is
    called with each batch that is over, at least once. `keyring` has the weights and limits of the keys that own
    batches, and `count_tokens` counts the tokens of prompts against these limits.
    """

    def __init__(
        self,
        redis: Redis,
        files: FileStore,
        completions: Completions,
        find_model: FindModel,
        model_names: Collection[str],
        clock: Clock,
        *,
        keyring: Keyring,
        count_tokens: CountTokens,
        num_slots: Callable[[], int],
        max_lines: int,
        max_unfinished: int,
        max_body_bytes: int,
        dead_letters: DeadLetters,
        on_end: OnEnd,
        tracer: BatchTracer | None,
        ttl_s: int,
    ) -> None:
        """`find_model` says which model a batch means. Its workers say how fast batches are.

        `num_slots` returns how many lines the live workers run at the same time.

        With a `tracer`, batches whose creation is traced have traces. Records live `ttl_s` seconds after the end.
        """
        self._store = BatchStore(redis)
        self._files = files
        statistics = LineStatistics(redis, clock)
        self.forecasts = BatchForecasts(self._store, statistics, find_model, clock)
        self._lines = LineRunner(completions, find_model, clock, statistics, self.forecasts, dead_letters, tracer)
        self._model_names = model_names
        self._scans: dict[str, InputScan] = {}  # of batches that are launched at this moment
        self._clock = clock
        self._keyring = keyring
        self._run_parts = RunParts(
            self._store,
            files,
            self._lines,
            LineWindow(partial(_window_size, MIN_WINDOW, num_slots), self._share_of, MAX_BODIES * max_body_bytes),
            TokenQuota(redis, self._keyring, count_tokens),
            self.rules,
            clock,
            on_end if tracer is None else _traced(on_end, tracer),
        )
        self._lock_ttl_s = LOCK_TTL_S
        self._max_lines = max_lines
        self._max_unfinished = max_unfinished
        self._max_body_bytes = max_body_bytes
        count_late = self.forecasts.count_late
        self._maintenance = BatchMaintenance(
            self._store, files, self._make_run, clock, LOCK_TTL_S, count_late, ttl_s, model_names
        )
        self.remove_ended = self._maintenance.remove_ended

    async def start(self) -> None:
        await self._maintenance.start()

    async def close(self) -> None:
        """Stop all runs and release their locks.

        A gateway with the same storage continues the batches: another one that is running, or this one when it is
        started again.
        """
        await self._maintenance.close()

    async def create(
        self, new: NewBatch, new_id: str | None = None, *, is_limited: bool = True
    ) -> Batch | InputProblem | Infeasible | TooManyBatches:
        """Create and start a batch.

        Return an `InputProblem` if its input file cannot be used, `Infeasible` if its window cannot be promised, and
        `TooManyBatches` if it `is_limited` and its owner has too many others.

        When this returns, the batch's record is durable. The batch also has its own link to the input, or its own copy.
        If it raises an error of the store or `DiskFull`, nothing of the batch is left, and it does not run. `new_id` is
        the batch's id without its prefix. If an earlier attempt has created this batch, it is returned.
        """
        batch_id = f"batch_{new_id or secrets.token_hex(12)}"
        if new_id is not None and (created := await self._store.get(batch_id)) is not None:
            await self._store.durable(batch_id)
            return created
        limit = self._max_unfinished if is_limited else None
        if limit is not None and await self._store.num_unfinished(new.owner) >= limit:
            return TooManyBatches(limit)  # said before its input is copied and read
        self._files.disk.check()
        absent = InputProblem(f"No such File object: {new.input_file_id[:200]}")
        file = await self._files.get(new.input_file_id, owner=new.owner)
        if file is None:
            return absent
        if file.purpose != "batch":
            return InputProblem(f"Invalid file purpose: expected 'batch', got '{file.purpose}'.")
        try:
            with noticing_full_disk():
                await self._files.storage.copy(content_name(file.id), input_name(batch_id))
                path = await self._files.storage.fetch(input_name(batch_id))
                scan = await offload(path, scan_input, self.rules(new.endpoint))
            batch = new.to_batch(batch_id, self._now_s(), scan.size)
            batch = replace(batch, input_sha256=file.sha256, traceparent=CURRENT_TRACE.get().traceparent or None)
            infeasible = await self.forecasts.infeasible(batch)
            if infeasible is not None:
                await self._maintenance.withdraw(batch_id, new.owner)
                return infeasible
            self._scans[batch_id] = scan  # the maintenance may run the batch as soon as it has a record
            if not await self._store.create(batch, limit):
                await self._maintenance.withdraw(batch_id, new.owner)
                return TooManyBatches(self._max_unfinished)
            await self._store.durable(batch_id)
            self.forecasts.on_created()
            self._maintenance.launch_if_room(batch_id)
            return batch
        except ContentLost:  # the file was deleted just now
            return absent
        except StorageUnreachable:  # it is not asked again: what it may have of the batch goes with the orphans
            raise
        except BaseException:
            await self._maintenance.withdraw(batch_id, new.owner)
            raise
        finally:
            self._scans.pop(batch_id, None)  # a run that begins later scans its input itself

    async def retrieve(self, batch_id: str, *, owner: str | None) -> Batch | None:
        """Return the batch; None if `owner` has no such batch."""
        batch = await self._store.get(batch_id)
        return batch if batch is not None and batch.owner == owner else None

    async def list(self, *, owner: str | None, after: str | None, limit: int) -> Page[Batch] | None:
        """Return a page of `owner`'s batches, newest first; None if the cursor `after` is not one of these batches."""
        return await self._store.page(owner=owner, after=after, limit=limit)

    async def cancel(self, batch_id: str, *, owner: str | None) -> Batch | NotCancellable | None:
        """Cancel a batch, and return its new record. A repeated call changes nothing.

        Return `NotCancellable` if the status of the batch does not allow it, and None if `owner` has no such batch.
        """
        if await self.retrieve(batch_id, owner=owner) is None:
            return None
        moved = await self._store.move(batch_id, BatchStatus.CANCELLING, self._now_s())
        batch = await self._store.get(batch_id)
        if batch is None:
            return None
        if moved is Moved.MOVED:
            self._maintenance.check(batch_id, batch.status)
            await self._store.durable(batch_id)
            if (await self._store.statuses([batch_id])).get(batch_id) not in _CANCELLED:
                raise NotDurable(LOST)
            return batch
        return batch if batch.status is BatchStatus.CANCELLED else NotCancellable(batch.status)

    async def delete(self, batch_id: str, *, owner: str | None) -> bool | None:
        """Delete the record of a batch that is over. Its files stay.

        Return False if it is not over or not yet cleared up, and None if `owner` has no such batch.
        """
        if await self.retrieve(batch_id, owner=owner) is None:
            return None
        return await self._store.remove(batch_id, owner, if_over=True)

    async def counts_by_status(self) -> dict[str, int]:
        """Return the number of batches in each state, summed over all gateways."""
        return {status.value: count for status, count in (await self._store.counts_by_status()).items()}

    def _make_run(self, batch_id: str) -> BatchRun:
        lock = self._store.owner_lock(batch_id, self._lock_ttl_s)
        return BatchRun(batch_id, lock, self._run_parts, self._scans.pop(batch_id, None))

    def rules(self, endpoint: str) -> InputRules:
        """Return what the lines of a batch of `endpoint` must keep to."""
        return InputRules(endpoint, tuple(self._model_names), self._max_lines, self._max_body_bytes)

    def _share_of(self, owner: str | None) -> KeyShare:
        key = self._keyring.named(owner)
        return KeyShare() if key is None else KeyShare(key.weight, key.batch_concurrent_lines)

    def _now_s(self) -> int:
        return self._clock.wall_ms() // 1000
