"""A worker as the model of the protocol has it: an engine that answers differently at each claim."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.interface import FinishReason
from scheduler.queue.redis import RedisQueue
from scheduler.queue.scripts import ClaimedRow
from scheduler.request import Checkpoint, Claimed, Delivery, EventKind, Lease, TokenEvent

LEASE_S = 10.0
MAX_TOKENS = 5  # of each request


@dataclass
class Held:
    """What a worker holds of a request."""

    lease: Lease
    delivery: Delivery
    tokens: list[int]
    num_reported: int

    @property
    def is_end(self) -> bool:
        return len(self.tokens) == MAX_TOKENS

    def event(self) -> TokenEvent:
        kind, reason = (EventKind.FINISHED, FinishReason.LENGTH) if self.is_end else (EventKind.TOKENS, None)
        index, self.num_reported = self.num_reported, len(self.tokens)
        lease = self.lease
        return TokenEvent(lease.request_id, kind, index, tuple(self.tokens[index:]), reason, fence=lease.fence)


@dataclass
class ModelWorker:
    queue: RedisQueue
    held: dict[str, Held] = field(default_factory=dict)
    ended: list[Lease] = field(default_factory=list)  # published, not yet acknowledged

    async def claim_without_reply(self, limit: int, name: str, now_ms: int) -> list[ClaimedRow]:
        """Claim, and get no reply: the next claim is the same one again."""
        self.queue._lost_claim = name
        return await self.queue._scripts.claim(
            self.queue._worker_id, name, now_ms, int(LEASE_S * 1000), {"realtime": limit}, 0
        )

    def begin(self, claimed: Claimed) -> list[TokenEvent]:
        """Begin a claimed request, or return the question of what its gateway has received."""
        request, lease = claimed.request, Lease(claimed.request.id, claimed.fence)
        if request.id in self.held and not request.is_delivered_in_parts:
            self.held[request.id].lease = lease
            return []
        self.held.pop(request.id, None)
        if claimed.is_taken_over:
            return [TokenEvent(request.id, EventKind.TAKEN_OVER, fence=claimed.fence)]
        tokens = list(claimed.output_token_ids)
        tokens = tokens if len(tokens) < MAX_TOKENS else []
        reported = (claimed.num_received or 0) if tokens else 0
        self.held[request.id] = Held(lease, request.delivery, tokens, reported)
        return []

    def step(self, numbers: Iterator[int], prefixes: dict[int, tuple[int, ...]]) -> list[TokenEvent]:
        """Generate a token of each request, which is the next number, and note in `prefixes` what is in front of it.

        Return the events.
        """
        events = []
        for held in list(self.held.values()):
            token = next(numbers)
            prefixes[token] = tuple(held.tokens)
            held.tokens.append(token)
            if held.is_end or held.delivery is Delivery.EACH_STEP:
                events.append(held.event())
            if held.is_end:
                self.ended.append(held.lease)
                del self.held[held.lease.request_id]
        return events

    async def save(self) -> None:
        await self.queue.checkpoint([Checkpoint(h.lease, 0, tuple(h.tokens)) for h in self.held.values()])

    async def renew(self) -> None:
        leases = [held.lease for held in self.held.values()]
        for lease, is_kept in zip(leases, await self.queue.renew(leases, LEASE_S), strict=True):
            if not is_kept:
                del self.held[lease.request_id]

    async def release(self) -> None:
        await self.queue.release([held.lease for held in self.held.values()])
