"""The queue protocol: where requests wait, in order, until a worker takes them under lease.

Two implementations, one contract suite: `redis` is the product, `memory` is for the simulator and unit tests.
A queue knows order, leases, sizes and limits. It does not decide how many are claimed from which tier (the SLA
controller does), nor what the limits are (admission does).

A request is in exactly one place: a tier's sorted set (score = `deadline_ms`), or the lease set (score = lease
expiry), or gone. Every move between them is atomic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.request import Claimed, Lease, Request


@dataclass(frozen=True, slots=True)
class QueueFull:
    """`put` refused: the tier already holds `depth` waiting requests."""

    tier: str
    depth: int
    limit: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits somewhere. Output tokens are the most that may come."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AheadLimit:
    """How much may wait ahead of what is put: in its own tier by a deadline no later, and all of the tiers `above`.
    `max_requests` of its own tier; of all together as many tokens as take `max_s`."""

    max_requests: float
    max_s: float
    prompt_token_s: float
    output_token_s: float
    above: tuple[str, ...] = ()

    def admits(self, ahead: Backlog) -> bool:
        seconds = ahead.prompt_tokens * self.prompt_token_s + ahead.output_tokens * self.output_token_s
        return ahead.requests <= self.max_requests and seconds <= self.max_s


@dataclass(frozen=True, slots=True)
class TooFarBehind:
    """`put` refused: so much waits ahead. `requests` are those of the own tier; tokens, of the tiers above, too."""

    tier: str
    ahead: Backlog


class Queue(Protocol):
    async def put(
        self, requests: Sequence[Request], limit: int | None = None, ahead: AheadLimit | None = None
    ) -> QueueFull | TooFarBehind | None:
        """Enqueue all of `requests` (of one tier) or none. `limit` bounds the tier's waiting requests, `ahead` what
        waits ahead of these; looked at and entered in one move, so that of a burst no more gets in than may. What is
        given back later is exempt from both. Putting an id that is already waiting or leased changes nothing (safe to
        repeat)."""
        ...

    async def claim(self, limits: Mapping[str, int], lease_s: float) -> list[Claimed]:
        """Take up to `limits[tier]` requests of each tier, earliest deadline first, in the mapping's order."""
        ...

    async def ack(self, leases: Sequence[Lease]) -> list[bool]:
        """The requests are done: forget them. False where the fence is stale or the request is gone."""
        ...

    async def renew(self, leases: Sequence[Lease], lease_s: float) -> list[bool]:
        """Extend leases. False where the lease was lost (expired and requeued, or cancelled): stop the work."""
        ...

    async def release(self, leases: Sequence[Lease]) -> list[bool]:
        """Give requests back unfinished: they return to their tier with their old deadline and place, and the claim
        does not count as an attempt."""
        ...

    async def requeue_expired(self) -> list[str]:
        """Return requests with expired leases to their tiers; the ids moved."""
        ...

    async def requeue_worker(self, worker_id: str) -> list[str]:
        """Return everything a (dead) worker holds under lease to its tiers; the ids moved."""
        ...

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        """Forget requests wherever they are. A worker that holds one learns it from `cancelled()` soon, or
        from `renew` at the latest. False where the id is unknown."""
        ...

    async def known(self, request_ids: Sequence[str]) -> list[bool]:
        """Whether each request still exists, waiting or leased. False: it is done, cancelled or lost."""
        ...

    async def depths(self, tiers: Sequence[str]) -> dict[str, int]:
        """Waiting (not leased) requests of each tier."""
        ...

    async def backlogs(self, tiers: Sequence[str]) -> dict[str, Backlog]:
        """The same with their tokens."""
        ...

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Return True as soon as something was put, requeued or cancelled since the last call returned;
        False after `timeout_s`. A wake-up may be spurious; it is never lost for longer than the timeout."""
        ...

    def cancelled(self) -> list[str]:
        """Ids cancelled since the last call, as far as they were announced. No I/O."""
        ...

    async def close(self) -> None: ...
