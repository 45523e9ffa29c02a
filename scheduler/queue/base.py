"""The queue protocol: requests wait in a queue until a worker claims them under a lease.

It has two implementations: `redis` for production, and `memory` for the simulator and unit tests. Both pass the same
contract suite. A queue knows order, leases, sizes and limits. It does not decide how many requests are claimed from
which tier (the SLA controller decides this), or what the limits are (admission decides this).

A request is in exactly one of three states: waiting in its tier's sorted set (score: `Request.score_ms`), leased in the
lease set (score: expiry of the lease), or gone. Every move is atomic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.request import Checkpoint, Claimed, Lease, Request

# After a put has woken a worker, further puts into the same queue wake no other one for this long, because that worker
# claims their requests, too: two round trips on a network.
WAKE_MS = 2


@dataclass(frozen=True, slots=True)
class QueueFull:
    """The reply of a refused `put`: the tier already has `depth` waiting requests.

    If they have too many bytes in the store, these are `num_bytes`, and `limit` is in bytes.
    """

    tier: str
    depth: int
    limit: int
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of waiting requests and of their tokens.

    `output_tokens` is the maximum number of tokens that the requests may generate.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AheadLimit:
    """The limit of the work that may wait ahead of new requests when `put` adds them to the queue.

    The work ahead is the waiting requests of the same tier with scores up to those of the new requests, and all waiting
    requests of the tiers `above`. `max_requests` limits the number of requests ahead in the same tier. `max_s` limits
    the time that the tokens of all requests ahead may take; a token takes `prompt_token_s` or `output_token_s` seconds.
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
class Preference:
    """The workers that serve new requests for less than others, because they hold the KV of what these begin with.

    It counts if one of the `workers` waits for the tier, or was woken for such requests and is about to claim them, and
    is busier by at most `slack` requests than the least busy worker that waits for it. Then the least busy of `workers`
    is woken, and others leave the requests to it until `until_ms` at most: its next claim takes them, or leaves them to
    all.
    """

    workers: tuple[str, ...]
    slack: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class DueLimit:
    """How many requests of a tier are claimed beyond its limit: at most `requests`, with scores up to `until_ms`."""

    requests: int
    until_ms: int


DueLimits = Mapping[str, DueLimit]  # by tier
NOTHING_DUE: DueLimits = {}


@dataclass(frozen=True, slots=True)
class TooFarBehind:
    """The reply of a refused `put`: too much work waits ahead.

    `ahead.requests` counts the requests of the same tier. The token counts in `ahead` also include the tiers above.
    """

    tier: str
    ahead: Backlog


class LeaseStore(Protocol):
    """Leases of a queue, whatever is queued, and the wake-ups of its workers."""

    async def renew(self, leases: Sequence[Lease], lease_s: float) -> list[bool]:
        """Extend leases. Return False for each lost lease, else True.

        A lease is lost if it has expired and its request was requeued, or if its request was cancelled. The worker must
        then stop the work on this request.
        """
        ...

    async def release(self, leases: Sequence[Lease]) -> list[bool]:
        """Give unfinished requests back to their tiers, with their old deadlines and places.

        Their claims do not count as attempts. Return False for each lost lease, else True.
        """
        ...

    async def expired_leases(self, lease_s: float) -> dict[str, int]:
        """Return the expiry in ms of each lease that seems to be over, by request id.

        A lease seems to be over if its expiry has passed, or is more than `lease_s` away: then a clock was set back
        after it was written. By clocks alone nobody can tell whether its holder is alive (`scheduler.worker.leases`).
        """
        ...

    async def requeue_expired(self, leases: Mapping[str, int]) -> list[str]:
        """Move requests back to their tiers whose leases still have the given expiries. Return their ids.

        The claims of the requests that cannot be blamed for the end of their worker (`note_step`) do not count as
        attempts. The same holds for `requeue_worker`.
        """
        ...

    async def requeue_worker(self, worker_id: str) -> list[str]:
        """Move all requests that a (dead) worker holds under lease back to their tiers. Return their sorted ids.

        `worker_id` is that of a handle, or what stands there before a `#`: then all such handles are meant.
        """
        ...

    async def wait_for_work(self, timeout_s: float) -> bool:
        """Return True as soon as this worker was woken since the last call returned.

        Of the workers that wait for a tier (`Queue.claim`), the least busy one is woken when requests of this tier are
        put (once within `WAKE_MS`) or given back, and the next one by a claim that leaves some. The holder of a
        cancelled request is woken, too. Return False after `timeout_s` seconds without a wake-up. A wake-up may be
        spurious. A lost one delays the caller by the timeout at most.
        """
        ...

    async def close(self) -> None: ...


class Queue(LeaseStore, Protocol):
    async def put(
        self,
        requests: Sequence[Request],
        limit: int | None = None,
        ahead: AheadLimit | None = None,
        max_bytes: int | None = None,
        prefer: Preference | None = None,
    ) -> QueueFull | TooFarBehind | None:
        """Enqueue all `requests` (of one tier), or none of them. Return None if they are enqueued.

        `limit` bounds the number of the tier's waiting requests, `max_bytes` their bytes in the store, unless none
        waits, and `ahead` bounds the work that waits ahead of `requests`. The check and the entry are one atomic move,
        so that a burst cannot exceed the bounds. Requests that are given back later are exempt from all bounds. Putting
        an id that is already waiting or leased changes nothing, so a put may be repeated. `prefer` says which workers
        are to claim them, if these wait.
        """
        ...

    async def claim(
        self, limits: Mapping[str, int], lease_s: float, load: int | None = None, due: DueLimits = NOTHING_DUE
    ) -> list[Claimed]:
        """Claim up to `limits[tier]` requests of each tier, under a lease of `lease_s` seconds.

        Tiers are served in the order of `limits`. Within a tier, requests are claimed from the least to the greatest
        score, without those that are left to another worker (`Preference`). Beyond the limit of a tier, those are
        claimed that `due` names. Each request comes with its output tokens that were checkpointed.

        While others wait for a tier, a worker takes no more of what is there than makes all equally busy, but at least
        one, and those that others leave to it. A worker with a `load`, about the number of requests that keep it busy,
        waits from then on for those of these tiers in which there was less than its limit, and for no other of them
        (`LeaseStore.wait_for_work`). A limit may be 0.
        """
        ...

    async def checkpoint(self, checkpoints: Sequence[Checkpoint]) -> list[int]:
        """Store output tokens of leased requests. Return the number of tokens that are now stored for each of them.

        Return -1 for each lost lease: only the holder of the lease writes. A checkpoint at index 0 replaces the stored
        tokens. Any other must begin where the stored tokens of this request end, or nothing is stored. The tokens stay
        until the request is acknowledged or cancelled; a store may forget them earlier, after a day without a
        checkpoint.

        Requests for the same part of a job share one output, which outlives them for a while. The next of them
        continues from it. If there are several at once, only the one that was put last writes: -1 for all others.
        """
        ...

    async def resume(self, received: Sequence[Checkpoint]) -> list[bool]:
        """Give claimed requests back to their tiers, with the whole output that their gateways have received.

        The next claim continues from it, or from the checkpoint if that begins with it, and says how many tokens were
        received (`Claimed.num_received`). This claim does not count as an attempt. Return False for each lost lease.
        """
        ...

    async def note_step(self, waits: Mapping[Lease, bool], alone: Lease | None) -> None:
        """Record, before a step, which requests can be blamed if this worker dies in it.

        `waits` says of requests whether they are in no step now; until then, a request counts as being in a step.
        `alone` is the request that runs alone in the step; None: none does. It holds until the next call.
        """
        ...

    async def ack(self, leases: Sequence[Lease]) -> list[bool]:
        """Forget finished requests. Return False for each lease with a stale fence or an unknown request, else True."""
        ...

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        """Forget requests, whether they wait or are leased. Return False for each unknown id, else True.

        A worker that holds a cancelled request learns of the cancel soon from `cancelled()`, or at the latest from
        `renew`.
        """
        ...

    async def known(self, request_ids: Sequence[str]) -> list[bool]:
        """Return whether each request still exists, waiting or leased.

        False means that the request is done, cancelled or lost.
        """
        ...

    async def depths(self, tiers: Sequence[str]) -> dict[str, int]:
        """Return the number of waiting (not leased) requests of each tier."""
        ...

    async def idle_workers(self, tiers: Sequence[str]) -> dict[str, int]:
        """Return how many workers with the load 0 wait for each tier (`claim`)."""
        ...

    async def backlogs(self, tiers: Sequence[str]) -> dict[str, Backlog]:
        """Return the number of waiting requests of each tier, and their tokens."""
        ...

    async def head_arrivals(self, tiers: Sequence[str]) -> dict[str, int]:
        """Return when the request arrived that is claimed next, in wall-clock ms, for each tier with waiting requests.

        Where all requests of a tier have the same time to their deadlines, it is the oldest one.
        """
        ...

    async def probe(self) -> None:
        """Write something that nobody reads, so that a store that takes no writes raises `StoreRefused`."""
        ...

    def cancelled(self) -> list[str]:
        """Return the ids of cancelled requests that have become known since the last call. Does no I/O."""
        ...
