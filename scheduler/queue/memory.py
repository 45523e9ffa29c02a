"""A queue in this process's memory, for the simulator and for tests of code that uses a queue.

It behaves exactly like the queue in Redis, numbers included: one contract suite runs on both. Its contents end with the
process. Handles made with `for_worker` share one queue, as several workers share one Redis.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from scheduler.clock import Clock
from scheduler.queue.base import (
    NOTHING_DUE,
    WAKE_MS,
    AheadLimit,
    Backlog,
    DueLimit,
    DueLimits,
    Preference,
    QueueFull,
    TooFarBehind,
)
from scheduler.queue.memory_state import Output, Record, Shared
from scheduler.queue.wakeups import Wakeups
from scheduler.request import Checkpoint, Claimed, Lease, Request


class MemoryQueue:
    """A queue in memory. Implements `scheduler.queue.base.Queue`."""

    def __init__(self, clock: Clock, worker_id: str = "", *, shared: Shared | None = None) -> None:
        self._clock = clock
        self._worker_id = worker_id
        self._shared = shared if shared is not None else Shared()
        self._wakeups = Wakeups(clock)
        self._shared.listeners.append((_id_of(worker_id), self._wakeups))

    def for_worker(self, worker_id: str) -> "MemoryQueue":
        """Return another handle on the same queue."""
        return MemoryQueue(self._clock, worker_id, shared=self._shared)

    async def put(
        self,
        requests: Sequence[Request],
        limit: int | None = None,
        ahead: AheadLimit | None = None,
        max_bytes: int | None = None,
        prefer: Preference | None = None,
    ) -> QueueFull | TooFarBehind | None:
        if not requests:
            return None
        tier = requests[0].tier
        if any(r.tier != tier for r in requests):
            raise ValueError("one put is for one tier")
        shared = self._shared
        fresh: dict[str, Request] = {}
        for request in requests:
            if request.id not in shared.records:
                fresh.setdefault(request.id, request)
        if not fresh:
            return None
        refusal = shared.refusal(tier, list(fresh.values()), limit, ahead, max_bytes)
        if refusal is not None:
            return refusal
        first, now_ms = self._take_numbers(len(fresh)), self._clock.wall_ms()
        numbers = {request_id: number for number, request_id in enumerate(fresh, first)}
        woken_ms = shared.woken_ms.get(tier, 0) if shared.waiting[tier].deadlines_ms else 0
        for request in fresh.values():
            shared.records[request.id] = record = Record(request, numbers[request.id])
            self._shared.enqueue(record)
        is_left = prefer is not None and shared.leave(numbers, tier, prefer, now_ms)
        if not is_left and not 0 <= now_ms - woken_ms < WAKE_MS:
            woken_ms = now_ms
            shared.wake(tier)
        shared.woken_ms[tier] = woken_ms
        return None

    async def claim(
        self, limits: Mapping[str, int], lease_s: float, load: int | None = None, due: DueLimits = NOTHING_DUE
    ) -> list[Claimed]:
        taken: list[Record] = []
        waits_for, me = [], _id_of(self._worker_id)
        mine, left = self._shared.split_left(me, limits, self._clock.wall_ms())
        for tier, limit in limits.items():
            beyond, of_others = due.get(tier, DueLimit(0, 0)), left[tier]
            share = limit
            if load is not None:
                share = self._shared.share(tier, limit, load, me, len(mine[tier]), len(of_others))
            popped = self._shared.pop(tier, share, of_others)
            popped += self._shared.pop(tier, beyond.requests, of_others, beyond.until_ms)
            taken += popped
            self._shared.waiters[tier].pop(me, None)
            is_waiting = load is not None and len(popped) < limit + beyond.requests
            if is_waiting:
                waits_for.append(tier)
            if len(self._shared.waiting[tier].deadlines_ms) > len(of_others) and (popped or not is_waiting):
                self._shared.wake(tier)
        for tier in waits_for:
            self._shared.waiters[tier][me] = (load or 0) + len(taken)
        if not taken:
            return []
        expires_ms = self._clock.wall_ms() + int(lease_s * 1000)
        for fence, record in enumerate(taken, self._take_numbers(len(taken))):
            record.fence, record.worker_id, record.expires_ms = fence, self._worker_id, expires_ms
            record.attempt += 1
        return [self._claimed(record, record.fence) for record in taken if record.fence is not None]

    def _claimed(self, record: Record, fence: int) -> Claimed:
        num_received, record.num_received = record.num_received, None
        output = self._take_output(record)
        return Claimed(record.request, fence, record.attempt, output, num_received=num_received)

    async def resume(self, received: Sequence[Checkpoint]) -> list[bool]:
        given = []
        for checkpoint in received:
            held = self._held(checkpoint.lease)
            given.append(held is not None)
            if held is not None:
                held.num_received = self._store_received(held, checkpoint)
                held.attempt -= 1
                self._give_back([held])
        return given

    async def checkpoint(self, checkpoints: Sequence[Checkpoint]) -> list[int]:
        stored = []
        for checkpoint in checkpoints:
            held = self._held(checkpoint.lease)
            stored.append(-1 if held is None else self._store_output(held, checkpoint))
        return stored

    async def note_step(self, waits: Mapping[Lease, bool], alone: Lease | None) -> None:
        self._shared.alone.pop(self._worker_id, None)
        if alone is not None:
            self._shared.alone[self._worker_id] = alone.request_id
        for lease, is_waiting in waits.items():
            held = self._held(lease)
            if held is not None:
                held.waits = is_waiting

    async def ack(self, leases: Sequence[Lease]) -> list[bool]:
        def end(held: Record) -> None:
            self._end_output(held)
            del self._shared.records[held.request.id]

        return self._for_held(leases, end)

    async def renew(self, leases: Sequence[Lease], lease_s: float) -> list[bool]:
        expires_ms = self._clock.wall_ms() + int(lease_s * 1000)

        def extend(held: Record) -> None:
            held.expires_ms = expires_ms

        return self._for_held(leases, extend)

    async def release(self, leases: Sequence[Lease]) -> list[bool]:
        def give_back(held: Record) -> None:
            held.attempt -= 1
            self._give_back([held])

        return self._for_held(leases, give_back)

    async def expired_leases(self, lease_s: float) -> dict[str, int]:
        now_ms = self._clock.wall_ms()
        latest_ms = now_ms + int(lease_s * 1000)
        return {r.request.id: r.expires_ms for r in self._leased() if not now_ms < r.expires_ms <= latest_ms}

    async def requeue_expired(self, leases: Mapping[str, int]) -> list[str]:
        return self._give_back_dead([r for r in self._leased() if leases.get(r.request.id) == r.expires_ms])

    async def requeue_worker(self, worker_id: str) -> list[str]:
        held = [r for r in self._leased() if f"{r.worker_id}#".startswith(f"{worker_id}#")]
        holders = {worker_id, *(r.worker_id for r in held)}
        moved = sorted(self._give_back_dead(held))
        for holder in holders:
            self._shared.alone.pop(holder, None)
        return moved

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        known = []
        for request_id in request_ids:
            record = self._shared.records.pop(request_id, None)
            known.append(record is not None)
            if record is None:
                continue
            self._end_output(record)
            if record.fence is None:
                self._shared.waiting[record.request.tier].remove(record.request)
            else:
                for listener in self._shared.listeners_of(_id_of(record.worker_id)):
                    listener.cancel(request_id)
        return known

    async def known(self, request_ids: Sequence[str]) -> list[bool]:
        return [request_id in self._shared.records for request_id in request_ids]

    async def idle_workers(self, tiers: Sequence[str]) -> dict[str, int]:
        return {tier: sum(load == 0 for load in self._shared.waiters[tier].values()) for tier in tiers}

    async def depths(self, tiers: Sequence[str]) -> dict[str, int]:
        return {tier: backlog.requests for tier, backlog in (await self.backlogs(tiers)).items()}

    async def backlogs(self, tiers: Sequence[str]) -> dict[str, Backlog]:
        return {tier: self._shared.waiting[tier].backlog for tier in tiers}

    async def head_arrivals(self, tiers: Sequence[str]) -> dict[str, int]:
        waiting = [r for r in self._shared.records.values() if r.fence is None]
        heads: dict[str, Record] = {}
        for record in sorted(waiting, key=lambda r: (r.request.score_ms, r.number)):
            heads.setdefault(record.request.tier, record)
        return {tier: heads[tier].request.arrival_ms for tier in tiers if tier in heads}

    async def probe(self) -> None:
        """Do nothing: memory takes every write."""

    async def wait_for_work(self, timeout_s: float) -> bool:
        return await self._wakeups.wait(timeout_s)

    def cancelled(self) -> list[str]:
        return self._wakeups.pop_cancelled()

    async def close(self) -> None:
        self._shared.listeners = [found for found in self._shared.listeners if found[1] is not self._wakeups]

    def _take_numbers(self, count: int) -> int:
        first = (self._shared.sequence or 1000 * self._clock.wall_ms()) + 1
        self._shared.sequence = first + count - 1
        return first

    def _held(self, lease: Lease) -> Record | None:
        record = self._shared.records.get(lease.request_id)
        return record if record is not None and record.fence == lease.fence else None

    def _for_held(self, leases: Sequence[Lease], change: Callable[[Record], None]) -> list[bool]:
        """Change the record of each lease. Return False for each lost lease."""
        kept = []
        for lease in leases:
            held = self._held(lease)
            if held is not None:
                change(held)
            kept.append(held is not None)
        return kept

    def _store_output(self, record: Record, checkpoint: Checkpoint) -> int:
        output = self._shared.outputs.get(record.output_name, Output())
        if output.writer > record.number:
            return -1
        may_append = output.writer == record.number and len(output.token_ids) == checkpoint.index
        if checkpoint.index == 0 or may_append:
            tokens = output.token_ids[: checkpoint.index] + checkpoint.token_ids
            output = self._shared.outputs[record.output_name] = Output(record.number, tokens)
        return len(output.token_ids)

    def _store_received(self, record: Record, received: Checkpoint) -> int:
        """Store what a gateway has received, unless the stored output begins with it. Return the number of tokens."""
        count, output = len(received.token_ids), self._shared.outputs.get(record.output_name, Output())
        if output.writer > record.number:
            return 0
        if output.token_ids[:count] != received.token_ids:
            self._store_output(record, received)
        return count

    def _take_output(self, record: Record) -> tuple[int, ...]:
        output = self._shared.outputs.get(record.output_name)
        if output is None:
            return ()
        output.writer = max(output.writer, record.number)
        return output.token_ids

    def _end_output(self, record: Record) -> None:
        output = self._shared.outputs.get(record.output_name)
        if not record.request.job_part:
            self._shared.outputs.pop(record.output_name, None)
        elif output is not None and output.writer == record.number:
            output.writer = 0

    def _leased(self) -> list[Record]:
        """Return the leased requests, sorted by expiry and then by id, as in the sorted set in Redis."""
        leased = [r for r in self._shared.records.values() if r.fence is not None]
        return sorted(leased, key=lambda r: (r.expires_ms, r.request.id))

    def _give_back_dead(self, records: Iterable[Record]) -> list[str]:
        records = list(records)
        for record in records:
            alone = self._shared.alone.get(record.worker_id)
            counts = not record.waits if alone is None else alone == record.request.id
            record.attempt -= not counts
        return self._give_back(records)

    def _give_back(self, records: Iterable[Record]) -> list[str]:
        moved = []
        for record in records:
            record.fence, record.waits = None, False
            self._shared.enqueue(record)
            self._shared.wake(record.request.tier)
            moved.append(record.request.id)
        return moved


def _id_of(holder: str) -> str:
    """Return the id of the worker of a `<worker id>#<incarnation>`."""
    return holder.partition("#")[0]
