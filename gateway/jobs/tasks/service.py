"""The task service: items for a worker with a static endpoint, their states and results.

A task lives in the store, not in a gateway: any gateway answers for it, and one that dies loses nothing. A task belongs
to the API key that created it, identified by the key's name. Knows tasks, tiers and the queue; does not know HTTP.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from gateway.http.trace import CURRENT_TRACE
from gateway.identity import ResolvedTier
from gateway.jobs.tasks.model import CreateTasks
from gateway.jobs.tasks.task_ends import TaskEnds
from scheduler.client import rejection
from scheduler.client.client import SchedulerClient
from scheduler.client.rejection import Rejected
from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.queue.base import QueueFull
from scheduler.store.errors import StoreRefused
from scheduler.tasks.queue import TaskQueue, TooManyBytes
from scheduler.tasks.task import StoredTask, Task, TaskState

# Share of a tier's `queue_limit` at which new tasks are refused: what has been accepted and fails needs the rest.
MAX_FILL = 0.9
MAX_RESULT_BYTES = 64 * 2**20  # of all tasks of one answer
DRAIN_CHECK_S = 1.0  # seconds between two looks at whether the gateway is ending, while a client waits for a task


class TooLargeAnswer(Exception):
    """The results of the tasks are too large for one answer."""


class TaskService:
    def __init__(
        self,
        queue: TaskQueue,
        ends: TaskEnds,
        client: SchedulerClient,
        clock: Clock,
        keep_s: float,
        timeout_s: float,
    ) -> None:
        """`keep_s` is how long the result of a task is kept after its end, `timeout_s` how long a task may wait."""
        self._queue = queue
        self._ends = ends
        self._client = client
        self._clock = clock
        self._keep_ms = int(keep_s * 1000)
        self._timeout_s = timeout_s

    async def create(
        self, body: CreateTasks, resolved: ResolvedTier, owner: str | None, new_id: str, *, may_exist: bool
    ) -> list[StoredTask] | Rejected | TooManyBytes:
        """Enqueue a task for each item of `body`, or none of them and return why.

        Their ids come from `new_id` (24 hex digits). If they `may_exist`, because an earlier attempt with this id may
        have been cut off, they are looked for first.
        """
        tasks = self._tasks(body, resolved, owner, new_id)
        if may_exist:
            found = await self._find_all([task.id for task in tasks], owner)
            if len(found) == len(tasks):
                return found
        if self._client.is_draining:
            return rejection.draining()
        if not self._client.live.has_endpoint:
            await self._client.live.look()
        if not self._client.live.has_endpoint:
            return rejection.no_task_worker()
        refused = await self._queue.put(tasks, task_limit(resolved.tier))
        if isinstance(refused, QueueFull):
            return rejection.queue_full(resolved.tier, refused, self._client.live.endpoints)
        if refused is not None:
            return refused
        return [StoredTask(task, TaskState.QUEUED, 0) for task in tasks]

    def _tasks(self, body: CreateTasks, resolved: ResolvedTier, owner: str | None, new_id: str) -> list[Task]:
        ids = [new_id] if len(body.items) == 1 else [_derived(new_id, number) for number in range(len(body.items))]
        now_ms, timeout_s = self._clock.wall_ms(), body.timeout_s or self._timeout_s
        return [
            Task(
                id=f"task_{task_id}",
                tier=resolved.tier.name,
                service_tier=resolved.service_tier,
                arrival_ms=now_ms,
                input=msgspec.json.encode(item),
                owner=owner or "",
                keep_ms=self._keep_ms,
                metadata=body.metadata,
                timeout_ms=max(1, round(timeout_s * 1000)),
                traceparent=CURRENT_TRACE.get().traceparent,
            )
            for task_id, item in zip(ids, body.items, strict=True)
        ]

    async def get(self, task_id: str, owner: str | None, wait_s: float = 0.0) -> StoredTask | None:
        """Return a task; None if `owner` has no such task. If it has not ended, wait for its end up to `wait_s`."""
        if wait_s <= 0:
            return await self._find(task_id, owner)
        until_s = self._clock.now() + wait_s
        with self._ends.watch(task_id) as ended:
            while True:
                ended.clear()
                found = await self._find(task_id, owner)
                if found is None or found.state.is_end or self._clock.now() >= until_s or self._client.is_draining:
                    return found
                await self._until_change(found, ended, until_s)

    async def _until_change(self, found: StoredTask, ended: asyncio.Event, until_s: float) -> None:
        """Wait until the task has ended or may have expired, the gateway drains, or it is `until_s`."""
        while not self._client.is_draining and (left_s := until_s - self._clock.now()) > 0:
            await _set_within(ended, min(left_s, DRAIN_CHECK_S))
            may_expire = found.state is TaskState.QUEUED and found.task.is_expired(self._clock.wall_ms())
            if ended.is_set() or may_expire:
                return

    async def get_all(self, task_ids: Sequence[str], owner: str | None) -> list[StoredTask]:
        """Return those of the tasks that `owner` has, each once. Raises `TooLargeAnswer`."""
        unique = list(dict.fromkeys(task_ids))
        if await self._queue.result_bytes(unique) > MAX_RESULT_BYTES:
            raise TooLargeAnswer
        return await self._find_all(unique, owner)

    async def _find_all(self, task_ids: Sequence[str], owner: str | None) -> list[StoredTask]:
        """Return the tasks that belong to `owner`. Tasks that have waited too long become dead letters."""
        found, now_ms = await self._queue.find(task_ids), self._clock.wall_ms()
        waiting = [stored.task for stored in found if stored is not None and stored.state is TaskState.QUEUED]
        if expired := [task for task in waiting if task.is_expired(now_ms)]:
            with suppress(StoreRefused):  # they are found to be expired again when the store takes writes
                await self._queue.expire(expired)
                found = await self._queue.find(task_ids)
        return [stored for stored in found if stored is not None and stored.task.owner == (owner or "")]

    async def cancel(self, found: StoredTask) -> StoredTask:
        """Cancel a task, and return what became of it: one that has ended stays as it is."""
        await self._queue.cancel(found.task)
        return await self._find(found.task.id, found.task.owner) or found

    async def dead(self, owner: str | None, limit: int, after: str | None) -> list[StoredTask] | None:
        """Return the dead letters of `owner` that follow the dead letter `after`, the newest first.

        None if there is no dead letter `after`.
        """
        return await self._queue.dead(owner or "", limit, after)

    async def revive(self, found: StoredTask, tier: Tier) -> StoredTask | TooManyBytes | None:
        """Enqueue a dead letter again in `tier`, with all its tries before it. None if it is no dead letter."""
        revived = await self._queue.revive(replace(found.task, tier=tier.name))
        if isinstance(revived, TooManyBytes):
            return revived
        return await self._find(found.task.id, found.task.owner) or found if revived else None

    async def close(self) -> None:
        await self._ends.close()

    async def _find(self, task_id: str, owner: str | None) -> StoredTask | None:
        return next(iter(await self._find_all([task_id], owner)), None)


def task_limit(tier: Tier) -> int:
    """Return the number of waiting tasks of a tier beyond which more are refused."""
    return max(1, int(MAX_FILL * tier.queue_limit))


def _derived(new_id: str, number: int) -> str:
    return hashlib.sha256(f"{new_id}/{number}".encode()).hexdigest()[:24]


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
