"""What the queue in memory stores. Only `MemoryQueue` changes it."""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler.queue.base import AheadLimit, Backlog, Preference, QueueFull, TooFarBehind
from scheduler.queue.wakeups import Wakeups
from scheduler.request import Request


@dataclass(slots=True)
class Record:
    """A request and its state: it waits if `fence` is None, and is leased otherwise."""

    request: Request
    number: int  # number of the put; requests with equal deadlines are claimed in the order of their numbers
    attempt: int = 0
    fence: int | None = None
    worker_id: str = ""
    expires_ms: int = 0
    num_received: int | None = 0  # tokens that its gateway has received; None: not told since the last claim
    waits: bool = False  # leased, and in no step of its worker

    @property
    def output_name(self) -> str:
        return self.request.job_part or self.request.id


@dataclass(slots=True)
class Output:
    """Checkpointed tokens of a request, or of a part of a job."""

    writer: int = 0  # number of the put of the request that may append; 0: none may
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LeftTo:
    """A waiting request that is left to a worker until `until_ms`, because a put has woken this worker for it."""

    number: int  # of the put
    tier: str
    worker_id: str
    until_ms: int
    load: int  # how busy the worker was, with what was left to it before


@dataclass(slots=True)
class Waiting:
    """The waiting requests of one tier: the sums of their tokens, and their deadlines in ascending order."""

    deadlines_ms: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def backlog(self) -> Backlog:
        return Backlog(len(self.deadlines_ms), self.prompt_tokens, self.output_tokens)

    def add(self, request: Request) -> None:
        insort(self.deadlines_ms, request.score_ms)
        self.prompt_tokens += len(request.prompt_token_ids)
        self.output_tokens += request.sampling.max_tokens

    def remove(self, request: Request) -> None:
        del self.deadlines_ms[bisect_left(self.deadlines_ms, request.score_ms)]
        self.prompt_tokens -= len(request.prompt_token_ids)
        self.output_tokens -= request.sampling.max_tokens

    def until(self, deadline_ms: int) -> Backlog:
        """Return the backlog of the requests that are due no later than `deadline_ms`.

        Their tokens are estimated: their share of the tier's requests, times the tier's tokens.
        """
        if not self.deadlines_ms:
            return Backlog()
        depth, ahead = len(self.deadlines_ms), bisect_right(self.deadlines_ms, deadline_ms)
        return Backlog(ahead, self.prompt_tokens * ahead // depth, self.output_tokens * ahead // depth)


@dataclass(slots=True)
class Shared:
    """The state that all handles of one queue share. Stale heap entries are skipped when they are popped."""

    records: dict[str, Record] = field(default_factory=dict)
    heaps: dict[str, list[tuple[int, int, str]]] = field(default_factory=lambda: defaultdict(list))
    waiting: dict[str, Waiting] = field(default_factory=lambda: defaultdict(Waiting))
    outputs: dict[str, Output] = field(default_factory=dict)  # those of parts of jobs are kept for ever
    alone: dict[str, str] = field(default_factory=dict)  # the request that runs alone, by worker id
    sequence: int = 0
    listeners: list[tuple[str, Wakeups]] = field(default_factory=list)  # with their worker ids
    waiters: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))  # by tier: loads of workers
    woken_ms: dict[str, int] = field(default_factory=dict)  # when a put has woken a worker, by tier
    left: dict[str, LeftTo] = field(default_factory=dict)  # by request id

    def listeners_of(self, worker_id: str) -> list[Wakeups]:
        return [wakeups for listener, wakeups in self.listeners if listener == worker_id]

    def enqueue(self, record: Record) -> None:
        request = record.request
        heapq.heappush(self.heaps[request.tier], (request.score_ms, record.number, request.id))
        self.waiting[request.tier].add(request)

    def pop(self, tier: str, limit: int, left: Collection[str], until_ms: int | None = None) -> list[Record]:
        """Pop up to `limit` requests, without those that are `left` to other workers."""
        popped: list[Record] = []
        passed = []
        heap = self.heaps[tier]
        while heap and len(popped) < limit and (until_ms is None or heap[0][0] <= until_ms):
            entry = heapq.heappop(heap)
            record = self.records.get(entry[2])
            if record is None or record.number != entry[1]:
                continue
            if record.request.id in left:
                passed.append(entry)
                continue
            popped.append(record)
            self.waiting[tier].remove(record.request)
        for entry in passed:
            heapq.heappush(heap, entry)
        return popped

    def split_left(
        self, worker_id: str, tiers: Collection[str], now_ms: int
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return the ids, by tier, of the requests that are left to this worker and of those that are left to others.

        The former are left to nobody from now on, as are those of the latter whose time is over.
        """
        mine: defaultdict[str, list[str]] = defaultdict(list)
        others: defaultdict[str, list[str]] = defaultdict(list)
        for request_id, to in list(self.left.items()):
            record = self.records.get(request_id)
            waits = record is not None and record.number == to.number and record.fence is None
            is_over = to.until_ms <= now_ms or not waits
            if not is_over and to.worker_id != worker_id:
                others[to.tier].append(request_id)
            elif not is_over and to.tier in tiers:
                mine[to.tier].append(request_id)
            if is_over or (to.worker_id == worker_id and to.tier in tiers):
                del self.left[request_id]
        return mine, others

    def share(self, tier: str, limit: int, load: int, worker_id: str, num_mine: int, num_left: int) -> int:
        """Return how many requests of the tier a worker may take: up to `limit`.

        If others wait for them, it is as many as make all equally busy, and the `num_mine` that are left to it.
        `num_left` are left to others.
        """
        others = sorted(other for waiter, other in self.waiters[tier].items() if waiter != worker_id)
        depth = self.waiting[tier].backlog.requests - num_left
        if not others or limit <= 1:
            return limit
        level, loads = float(load + depth), [load]
        for other in others if depth > 1 else ():
            if other >= level:
                break
            loads.append(other)
            level = (depth + sum(loads)) / len(loads)
        return min(limit, max(1, math.ceil(level - load)) + num_mine)

    def leave(self, numbers: Mapping[str, int], tier: str, prefer: Preference, now_ms: int) -> bool:
        """Wake the least busy preferred worker, and leave the new requests to it.

        `numbers` are those of their puts, by id. Return False if no preferred worker waits for `tier` or has been woken
        for requests that it has not claimed yet, if all are too busy beside the least busy worker that waits (0 if none
        does), or if the worker has ended.
        """
        waiters = self.waiters[tier]
        loads = {to.worker_id: to.load + 1 for to in self.left.values() if to.tier == tier and to.until_ms > now_ms}
        loads |= waiters
        most = min(waiters.values(), default=0) + prefer.slack
        preferred = [worker for worker in prefer.workers if loads.get(worker, most + 1) <= most]
        if not preferred:
            return False
        chosen = min(preferred, key=lambda worker: loads[worker])
        waiters.pop(chosen, None)
        for listener in (found := self.listeners_of(chosen)):
            listener.wake()
        if found:
            for load, (request_id, number) in enumerate(numbers.items(), loads[chosen]):
                self.left.pop(request_id, None)  # the new entry comes last
                self.left[request_id] = LeftTo(number, tier, chosen, prefer.until_ms, load)
        return bool(found)

    def wake(self, tier: str) -> None:
        """Wake the least busy worker that waits for `tier`."""
        waiters = self.waiters[tier]
        while waiters:
            worker_id = min(waiters, key=lambda waiter: (waiters[waiter], waiter))
            del waiters[worker_id]
            for listener in (found := self.listeners_of(worker_id)):
                listener.wake()
            if found:
                break

    def refusal(
        self,
        tier: str,
        requests: Sequence[Request],
        limit: int | None,
        ahead: AheadLimit | None,
        max_bytes: int | None,
    ) -> QueueFull | TooFarBehind | None:
        """Return why the new `requests` of one tier may not be put, as `Queue.put` does; None if they may."""
        depth = self.waiting[tier].backlog.requests
        if limit is not None and depth + len(requests) > limit:
            return QueueFull(tier, depth, limit)
        if max_bytes is not None and depth > 0:
            waiting = [r.request for r in self.records.values() if r.fence is None and r.request.tier == tier]
            num_bytes = _num_bytes(waiting)
            if num_bytes + _num_bytes(requests) > max_bytes:
                return QueueFull(tier, depth, max_bytes, num_bytes)
        if ahead is not None:
            before = self._ahead(tier, max(r.score_ms for r in requests), ahead.above)
            if not ahead.admits(before):
                return TooFarBehind(tier, before)
        return None

    def _ahead(self, tier: str, deadline_ms: int, above: Sequence[str]) -> Backlog:
        own = self.waiting[tier].until(deadline_ms)
        others = [self.waiting[name] for name in above]
        return Backlog(
            own.requests,
            own.prompt_tokens + sum(w.prompt_tokens for w in others),
            own.output_tokens + sum(w.output_tokens for w in others),
        )


def _num_bytes(requests: Iterable[Request]) -> int:
    return sum(len(msgspec.msgpack.encode(request)) for request in requests)
