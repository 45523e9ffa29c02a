"""The queue protocol: requests wait here in order until a worker claims them under a lease.

Two implementations pass one contract suite: `redis` is for production, `memory` for the simulator and unit tests. A
queue knows order, leases, sizes and limits. It does not decide how many requests are claimed from which tier (the SLA
controller does), nor what the limits are (admission does).

A request is in exactly one place: in its tier's sorted set (score = `deadline_ms`), in the lease set (score = expiry of
the lease), or gone. Every move is atomic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.request import Claimed, Lease, Request


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The reply of a refused `put`: the tier already has `depth` waiting requests."""

    tier: str
    depth: int
    limit: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """Waiting requests and their tokens. Output tokens are the most that the requests may generate."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AheadLimit:
    """The most that may wait ahead of a put: requests of its own tier due no later, and all of the tiers `above`.

    `max_requests` counts those of its own tier. The tokens of all of them together may take `max_s` seconds.
    """

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
    """The reply of a refused `put`: too much waits ahead.

    `ahead.requests` counts requests of the same tier. Tokens count the tiers above as well.
    """

    tier: str
    ahead: Backlog


class Queue(Protocol):
    async def put(
        self, requests: Sequence[Request], limit: int | None = None, ahead: AheadLimit | None = None
    ) -> QueueFull | TooFarBehind | None:
        """Enqueue all of `requests` (of one tier) or none.

        `limit` bounds the tier's waiting requests, `ahead` bounds what waits ahead of `requests`. Check and entry are
        one atomic move, so that a burst cannot exceed the bounds. Requests given back later are exempt from both.
        Putting an id that is already waiting or leased changes nothing, so a put may be repeated.
        """
        ...

    async def claim(self, limits: Mapping[str, int], lease_s: float) -> list[Claimed]:
        """Take up to `limits[tier]` requests of each tier, earliest deadline first, in the mapping's order."""
        ...

    async def ack(self, leases: Sequence[Lease]) -> list[bool]:
        """Forget finished requests. False for each lease with a stale fence or an unknown request."""
        ...

    async def renew(self, leases: Sequence[Lease], lease_s: float) -> list[bool]:
        """Extend leases. False for each lost lease (expired and requeued, or cancelled): stop its work."""
        ...

    async def release(self, leases: Sequence[Lease]) -> list[bool]:
        """Give unfinished requests back to their tier, with their old deadline and place.

        The claim does not count as an attempt. False for each lease that was lost.
        """
        ...

    async def requeue_expired(self) -> list[str]:
        """Move requests with expired leases back to their tiers. Return their ids."""
        ...

    async def requeue_worker(self, worker_id: str) -> list[str]:
        """Move everything that a (dead) worker holds under lease back to its tiers. Return the ids."""
        ...

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        """Forget requests wherever they are. False for each unknown id.

        A worker that holds one learns of it soon from `cancelled()`, or from `renew` at the latest.
        """
        ...

    async def known(self, request_ids: Sequence[str]) -> list[bool]:
        """Whether each request still exists, waiting or leased. False: done, cancelled or lost."""
        ...

    async def depths(self, tiers: Sequence[str]) -> dict[str, int]:
        """Return the number of waiting (not leased) requests of each tier."""
        ...

    async def backlogs(self, tiers: Sequence[str]) -> dict[str, Backlog]:
        """Return the waiting requests of each tier with their tokens."""
        ...

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Return True as soon as something was put, requeued or cancelled since the last call returned.

        Return False after `timeout_s`. A wake-up may be spurious, and a lost one delays the caller by the timeout at
        most.
        """
        ...

    def cancelled(self) -> list[str]:
        """Return the ids cancelled since the last call, as far as the news has arrived. No I/O."""
        ...

    async def close(self) -> None: ...
