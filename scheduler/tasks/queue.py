"""The queue of tasks in Redis or Valkey, and the records of ended ones.

It is the requests' queue in a namespace of its own, with the same scripts: order, leases, fences, tries. A task's end
and its record are one atomic move, so each task either waits, runs, or has a record. A task travels as the request's
payload, and its input beside it, so that looking for a task does not read the input.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from scheduler.clock import Clock
from scheduler.queue.base import QueueFull
from scheduler.queue.leased import LeasedQueue, decode_known
from scheduler.queue.redis import NO_LIMIT
from scheduler.queue.scripts import put_args, queue_prelude
from scheduler.store import keys
from scheduler.store.errors import UNREADABLE
from scheduler.store.scripts import load_script, script_text
from scheduler.tasks.task import VERSION, ClaimedTask, EndedTask, LaneDepth, RetriedTask, StoredTask, Task, TaskState

log = structlog.get_logger()

_ENDED_FIELDS = ("task", "state", "attempt", "ended_ms", "result", "error")
_PUT = "local function enqueue(ARGV)\n{}\nend\n"  # the queue's script `put`, for another script


class _Owned(msgspec.Struct):
    """The part of a `Task` that a dead letter needs. The rest of a payload is skipped."""

    owner: str = ""


@dataclass(frozen=True, slots=True)
class TooManyBytes:
    """The reason why a task is refused: with it, the waiting and running tasks of its owner have over `limit` bytes."""

    held: int
    limit: int


class TaskQueue(LeasedQueue):
    """The tasks of all gateways and workers. Claims of this handle are leased to `worker_id`.

    `max_bytes` limits the waiting and running tasks of one owner, when this handle enqueues them.
    """

    _keys: keys.TaskKeys

    def __init__(self, client: Redis, clock: Clock, worker_id: str = "", max_bytes: int = 2**30) -> None:
        names = keys.Keys.of(client).tasks
        super().__init__(client, clock, worker_id, names)
        self._max_bytes = max_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(Task)
        # A worker that waits for its batch to fill looks at each task that is put.
        prelude = queue_prelude(names, wake_ms=0) + _record_names(names) + script_text("scheduler.queue", "shared")

        def load(name: str, more: str = "") -> AsyncScript:
            return load_script(client, "scheduler.tasks", "record", name, prelude=prelude + more)

        self._put = load("put_tasks", _PUT.format(script_text("scheduler.queue", "put")))
        self._end, self._retry, self._cancel = load("end"), load("retry"), load("cancel_task")
        self._revive, self._expire, self._depths = load("revive"), load("expire"), load("depths")

    # -- gateways ----------------------------------------------------------------------------------------------

    async def put(self, tasks: Sequence[Task], limit: int) -> QueueFull | TooManyBytes | None:
        """Enqueue all `tasks` (of one tier and one owner), or none if more than `limit` would wait then."""
        tier, inputs = tasks[0].tier, [task.input for task in tasks]
        rows = [(t.id, t.arrival_ms, 0, 0, self._head(t), "", "") for t in tasks]
        put = put_args(tier, limit, self._clock.wall_ms(), NO_LIMIT, rows)
        match await self._put(args=[tasks[0].owner, self._max_bytes, len(inputs), *inputs, *put]):
            case [b"full", depth]:
                return QueueFull(tier, depth, limit)
            case [b"bytes", held]:
                return TooManyBytes(held, self._max_bytes)
        return None

    async def result_bytes(self, task_ids: Sequence[str]) -> int:
        """Return the size of the results of all these tasks together."""
        pipeline = self._client.pipeline(transaction=False)
        for task_id in task_ids:
            pipeline.hstrlen(self._keys.ended + task_id, "result")
        return sum(await pipeline.execute())

    async def find(self, task_ids: Sequence[str]) -> list[StoredTask | None]:
        """Return the state of each task, without its input; None for one that is unknown or has expired."""
        pipeline = self._client.pipeline(transaction=True)
        for task_id in task_ids:
            pipeline.hmget(self._keys.request + task_id, ["payload", "fence", "attempt"])
            pipeline.hmget(self._keys.ended + task_id, list(_ENDED_FIELDS))
        replies = await pipeline.execute() if task_ids else []
        pairs = zip(task_ids, replies[::2], replies[1::2], strict=True)
        return [self._stored(task_id, open_, ended) for task_id, open_, ended in pairs]

    async def cancel(self, task: Task) -> bool:
        """Cancel a task. Return False if it has ended before."""
        return bool(await self._cancel(args=[task.id, task.owner, self._clock.wall_ms(), task.keep_ms]))

    async def expire(self, tasks: Sequence[Task]) -> None:
        """Make dead letters of those of `tasks`, whose timeouts have passed, that still wait."""
        args: list[Any] = [self._clock.wall_ms(), *_dead_limits()]
        for task in tasks:
            args += [task.id, task.owner, task.timeout_error]
        if tasks:
            await self._expire(args=args)

    async def dead(self, owner: str, limit: int, after: str | None = None) -> list[StoredTask] | None:
        """Return dead letters of `owner`, the newest first, of those that follow the dead letter `after`.

        None if there is no dead letter `after`.
        """
        key, rank = self._keys.dead + owner, -1
        if after is not None:
            size: Any = await self._client.hget(self._keys.ended + after, "bytes")
            found: Any = size and await self._client.zrevrank(key, f"{after}:{size.decode()}")
            if found is None:
                return None
            rank = found
        members: list[Any] = await self._client.zrange(key, rank + 1, rank + limit, desc=True)
        ids = [member.decode().rpartition(":")[0] for member in members]
        return [stored for stored in await self.find(ids) if stored is not None]

    async def revive(self, task: Task) -> TooManyBytes | bool:
        """Enqueue a dead letter as a new task with the same id. Return False if it is no dead letter."""
        now_ms = self._clock.wall_ms()
        fresh = msgspec.structs.replace(task, failures=(), arrival_ms=now_ms)
        args: list[Any] = [task.id, task.owner, task.tier, now_ms, self._head(fresh), now_ms, self._max_bytes]
        match await self._revive(args=args):
            case [b"bytes", held]:
                return TooManyBytes(held, self._max_bytes)
            case refused:
                return not refused

    # -- workers -----------------------------------------------------------------------------------------------

    async def depths(self, lanes: Sequence[str]) -> dict[str, LaneDepth]:
        found = await self._depths(args=[self._worker_id, *lanes])
        pairs = zip(found[::2], found[1::2], strict=True)
        return {lane: LaneDepth(n, int(float(first))) for lane, (n, first) in zip(lanes, pairs, strict=True)}

    async def claim(self, limits: Mapping[str, int], lease_s: float) -> list[ClaimedTask]:
        """Claim up to `limits[lane]` tasks of each lane, in this order, the oldest of a lane first."""
        claimed = []
        for task_id, payload, fence, attempt, _, _, input in await self._claim(limits, lease_s):
            try:
                claimed.append(ClaimedTask(self._task(payload or b"", input), fence, attempt))
            except UNREADABLE as error:
                await self._bury(task_id.decode(), payload or b"", fence, str(error))
        return claimed

    async def _bury(self, task_id: str, payload: bytes, fence: int, reason: str) -> None:
        """Make a dead letter of a claimed task that cannot be read. A later version may retry it: it stays as it is."""
        log.error("a task cannot be read; it becomes a dead letter", task=task_id, reason=reason)
        owner, keep_ms = self._outline(task_id, payload).owner, int(keys.DEAD_TTL_S * 1000)
        row = (task_id, fence, TaskState.DEAD.value, keep_ms, owner, payload, b"", f"It cannot be read: {reason}.")
        await self._end(args=[self._clock.wall_ms(), *_dead_limits(), *row])

    async def end(self, ended: Sequence[EndedTask]) -> list[bool]:
        """Write the ends of claimed tasks. Return False for each that this worker does not hold any more."""
        args: list[Any] = [self._clock.wall_ms(), *_dead_limits()]
        for e in ended:
            keep_ms = int(keys.DEAD_TTL_S * 1000) if e.state is TaskState.DEAD else e.task.keep_ms
            head = (e.task.id, e.claimed.fence, e.state.value, keep_ms, e.task.owner)
            args += [*head, self._head(e.task), e.result or b"", e.error]
        return [reply == 1 for reply in await self._end(args=args)] if ended else []

    async def retry(self, retried: Sequence[RetriedTask]) -> list[bool]:
        """Give claimed tasks back into their next lanes. Return False for each that this worker does not hold."""
        args: list[Any] = []
        for r in retried:
            args += [r.task.id, r.claimed.fence, r.lane, self._head(r.task), 0 if r.counts else -1]
        return [reply == 1 for reply in await self._retry(args=args)] if retried else []

    def _head(self, task: Task) -> bytes:
        """Return the payload of a task: the task without its input."""
        return self._encode(msgspec.structs.replace(task, input=b""))

    def _task(self, payload: bytes, input: bytes | None) -> Task:
        task = decode_known(self._decoder, payload, VERSION)  # with its input if an older version has put it
        return task if input is None else msgspec.structs.replace(task, input=input)

    def _outline(self, task_id: str, payload: bytes) -> Task:
        """Return a task that is not readable, with its id, and its owner if the payload names one."""
        owner = ""
        with suppress(*UNREADABLE):
            owner = msgspec.msgpack.decode(payload, type=_Owned).owner
        return Task(task_id, "", "", self._clock.wall_ms(), owner=owner, version=VERSION + 1)

    def _stored(self, task_id: str, open_: Sequence[Any], ended: Sequence[Any]) -> StoredTask | None:
        payload, fence, attempt = open_
        if payload is not None:
            state = TaskState.QUEUED if fence is None else TaskState.RUNNING
            return StoredTask(self._readable(task_id, payload), state, int(attempt or 0))
        payload, name, attempt, ended_ms, result, error = ended
        if payload is None:
            return None
        try:
            state = TaskState(name.decode())
        except ValueError:
            log.error("a task has a state that is not known here; it is left out", task=task_id, state=name.decode())
            return None
        task, output = self._readable(task_id, payload), result if state is TaskState.DONE else None
        # The claim that found a worker to have died in the last try was no try.
        attempts = len(task.failures) if state is TaskState.DEAD else int(attempt)
        return StoredTask(task, state, attempts, int(ended_ms), output, error.decode())

    def _readable(self, task_id: str, payload: bytes) -> Task:
        try:
            return self._decoder.decode(payload)
        except UNREADABLE:  # its state, result and error are stored apart
            return self._outline(task_id, payload)


def _dead_limits() -> tuple[int, int, int]:
    """Return how long dead letters are kept in ms, how many of one owner, and how many bytes of these."""
    return int(keys.DEAD_TTL_S * 1000), keys.MAX_DEAD, keys.MAX_DEAD_BYTES


def _record_names(names: keys.TaskKeys) -> str:
    strings = {"ENDED": names.ended, "DEAD": names.dead, "DEAD_BYTES": names.dead_bytes}
    strings |= {"BYTES": names.bytes, "NEWS": names.news}
    return "".join(f"local {name} = '{key}'\n" for name, key in strings.items())
