"""A gateway's requests in flight, by tier, and the usual token counts of its recent requests.

The counts are exact at every moment, while a worker's heartbeat may be a second old. So admission sees a burst here
even after its requests have left the queue. The counts cover only the requests of this gateway.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from scheduler.config import Tier
from scheduler.request import OWN_REQUESTS, Delivery, EventKind, Request, TokenEvent

# Each newer request multiplies the weight of the older requests by this factor. The shares are thus as steady as
# those of 63 requests with equal weights.
DECAY = 31 / 32


@dataclass(slots=True)
class RecentRatio:
    """A part of a whole, as the sums of both over recent requests."""

    part: float = 0.0
    whole: float = 0.0

    def add(self, part: int, whole: int) -> None:
        self.part = DECAY * self.part + part
        self.whole = DECAY * self.whole + whole

    @property
    def value(self) -> float | None:
        return self.part / self.whole if self.whole > 0 else None


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The share of a tier's prompt tokens that is usually cached, and of `max_tokens` that is usually generated."""

    cached_share: float = 0.0  # prompt tokens found in the prefix cache ÷ prompt tokens
    output_share: float | None = None  # output tokens ÷ `max_tokens`; None: no request has ended


@dataclass(slots=True)
class _OpenOfKey:
    """The open requests of one key in one tier."""

    requests: int = 0
    prompt_tokens: int = 0  # of those that are unanswered
    last_ms: int = 0  # their greatest score
    weight: int = 1  # that of the newest


class InFlight:
    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._unanswered: set[str] = set()  # ids of the requests that have no first token yet
        self._open: defaultdict[str, dict[str, _OpenOfKey]] = defaultdict(dict)  # by tier and key
        self._cached: defaultdict[str, RecentRatio] = defaultdict(RecentRatio)
        self._output: defaultdict[str, RecentRatio] = defaultdict(RecentRatio)

    def add(self, requests: Iterable[Request], *, are_passed: bool = False) -> None:
        """Count `requests` as open. If they `are_passed` by newer requests, their prompts are ahead of nobody."""
        for request in requests:
            if request.id in self._requests:
                continue
            self._requests[request.id] = request
            of_key = self._open[request.tier].setdefault(request.owner, _OpenOfKey())
            of_key.requests += 1
            of_key.last_ms, of_key.weight = request.score_ms, request.weight
            # A request with another delivery mode sends no event at its first token, so it is never counted as
            # unanswered.
            if request.delivery is Delivery.EACH_STEP and not are_passed:
                self._unanswered.add(request.id)
                of_key.prompt_tokens += len(request.prompt_token_ids)

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended in any way. An unknown id changes nothing."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._mark_answered(request)
            of_tier = self._open[request.tier]
            of_tier[request.owner].requests -= 1
            if not of_tier[request.owner].requests:
                del of_tier[request.owner]

    def on_event(self, event: TokenEvent) -> None:
        """Process an event: the first event of a request ends its wait, the last event removes the request."""
        request = self._requests.get(event.request_id)
        if request is None:
            return
        if event.kind is EventKind.TOKENS and event.request_id not in self._unanswered:
            return
        if event.token_ids and event.index == 0:
            self._cached[request.tier].add(event.cached_tokens, len(request.prompt_token_ids))
        self._mark_answered(request)
        if event.kind is EventKind.FINISHED:
            self._output[request.tier].add(event.index + len(event.token_ids), request.sampling.max_tokens)
        if event.is_last:
            self.remove(event.request_id)

    def _mark_answered(self, request: Request) -> None:
        if request.id in self._unanswered:
            self._unanswered.remove(request.id)
            self._open[request.tier][request.owner].prompt_tokens -= len(request.prompt_token_ids)

    def num_open(self, tier: str, owner: str | None = None) -> int:
        """Return the number of the tier's open requests, of all keys or of one."""
        if owner is None:
            return sum(of_key.requests for of_key in self._open[tier].values())
        return self._of_key(tier, owner).requests

    def unanswered_tokens(self, tiers: Iterable[str]) -> int:
        """Return the prompt tokens of all requests in `tiers` without a first token.

        These requests may be in the queue or at a worker.
        """
        return sum(of_key.prompt_tokens for tier in tiers for of_key in self._open[tier].values())

    def by_number(self, tier: Tier, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests of an interactive tier with their places in the queue.

        Each one of a key beyond the first few counts as due one `deadline_ms`, divided by the key's weight, later than
        the one before, so that of two keys of one weight the one with fewer open requests goes first. A key's own
        requests stay in order.
        """
        of_key = self._of_key(tier.name, requests[0].owner)
        last_ms, placed = of_key.last_ms, []
        for number, request in enumerate(requests, of_key.requests + 1):
            later_ms = max(0, number - OWN_REQUESTS) * tier.deadline_ms // request.weight
            last_ms = max(last_ms, request.deadline_ms + later_ms)
            placed.append(structs.replace(request, order_ms=last_ms) if last_ms > request.deadline_ms else request)
        return placed

    def ahead(self, tier: str, owner: str, weight: int, few: int) -> tuple[int, int]:
        """Return how many open requests of the tier are before the next one of a key, and their unanswered tokens.

        Of each other key, the first `few` are before it, and of the further ones as many as the key has itself beyond
        `few`, in proportion to the weights. Their tokens are estimated: their share of the key's requests, times its
        tokens.
        """
        beyond = max(0, self._of_key(tier, owner).requests + 1 - few) / weight
        requests, tokens = 0, 0
        for other, of_key in self._open[tier].items():
            count = of_key.requests
            before = count if other == owner else min(count, few + int(beyond * of_key.weight))
            requests += before
            tokens += of_key.prompt_tokens * before // count
        return requests, tokens

    def _of_key(self, tier: str, owner: str) -> _OpenOfKey:
        return self._open[tier].get(owner, _OpenOfKey())

    def due_by(self, tier: str, deadline_ms: int) -> tuple[int, int]:
        """Return the prompt tokens and the maximum output tokens of running requests due by `deadline_ms`.

        Only requests of `tier` count. Queued requests are left out, because the queue counts them during the put. This
        method scans all requests in flight; it is called only for requests with a deadline of their own.
        """
        due = (r for r in self._requests.values() if r.tier == tier and r.deadline_ms <= deadline_ms)
        running = [r for r in due if r.delivery is Delivery.EACH_STEP and r.id not in self._unanswered]
        return sum(len(r.prompt_token_ids) for r in running), sum(r.sampling.max_tokens for r in running)

    def usage(self, tier: str) -> TierUsage:
        return TierUsage(self._cached[tier].value or 0.0, self._output[tier].value)
