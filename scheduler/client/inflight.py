"""What a gateway has under way, by tier, and what became of its requests so far.

Exact at every moment, where a worker's heartbeat is a second old: of a burst, admission sees here what has left the
queue already. Knows the requests of its own gateway only.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.request import Delivery, EventKind, Request, TokenEvent

FORGETTING = 63 / 64  # an older request's weight, with each that is newer
ENOUGH = 8  # requests, before a share is believed
CACHED_AT_MOST = 0.95  # the next prompts may be others


@dataclass(slots=True)
class _Share:
    """A part of a whole, over the last requests. Owner: `InFlight`."""

    part: float = 0.0
    whole: float = 0.0
    count: int = 0

    def add(self, part: int, whole: int) -> None:
        self.part = FORGETTING * self.part + part
        self.whole = FORGETTING * self.whole + whole
        self.count += 1

    @property
    def value(self) -> float | None:
        return self.part / self.whole if self.count >= ENOUGH and self.whole > 0 else None


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier's requests are usually like. Of their prompts' tokens, those found in the prefix cache; of the output
    tokens they may have, those that came (None: too few have ended)."""

    cached_share: float = 0.0
    output_share: float | None = None


class InFlight:
    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._unanswered: set[str] = set()
        self._num_open: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._cached: defaultdict[str, _Share] = defaultdict(_Share)
        self._output: defaultdict[str, _Share] = defaultdict(_Share)

    def enter(self, requests: Iterable[Request], *, are_passed: bool = False) -> None:
        """`are_passed`: their prompts are ahead of nobody; those that can still be in time go first."""
        for request in requests:
            if request.id in self._requests:
                continue
            self._requests[request.id] = request
            self._num_open[request.tier] += 1
            if request.delivery is Delivery.EACH_STEP and not are_passed:  # the others say nothing before their end
                self._unanswered.add(request.id)
                self._prompt_tokens[request.tier] += len(request.prompt_token_ids)

    def leave(self, request_id: str) -> None:
        """It is over, however it ended."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._num_open[request.tier] -= 1
            self._answered(request)

    def hear(self, event: TokenEvent) -> None:
        """An event of a request: the first one ends its wait, the last one its life."""
        request = self._requests.get(event.request_id)
        if request is None:
            return
        if event.kind is EventKind.TOKENS and event.request_id not in self._unanswered:
            return
        if event.token_ids and event.index == 0:
            self._cached[request.tier].add(event.cached_tokens, len(request.prompt_token_ids))
        self._answered(request)
        if event.kind is EventKind.FINISHED:
            self._output[request.tier].add(event.index + len(event.token_ids), request.sampling.max_tokens)
        if event.is_last:
            self.leave(event.request_id)

    def _answered(self, request: Request) -> None:
        if request.id in self._unanswered:
            self._unanswered.remove(request.id)
            self._prompt_tokens[request.tier] -= len(request.prompt_token_ids)

    def num_open(self, tier: str) -> int:
        return self._num_open[tier]

    def unanswered_tokens(self, tiers: Iterable[str]) -> int:
        """Prompt tokens of those in `tiers` that wait for their first token, wherever they are."""
        return sum(self._prompt_tokens[tier] for tier in tiers)

    def due_by(self, tier: str, deadline_ms: int) -> tuple[int, int]:
        """Prompt and most output tokens of what is known to have begun in `tier` and is due by then: what waits counts
        with the put. Looks at all that is under way: for requests with a deadline of their own."""
        due = (r for r in self._requests.values() if r.tier == tier and r.deadline_ms <= deadline_ms)
        begun = [r for r in due if r.delivery is Delivery.EACH_STEP and r.id not in self._unanswered]
        return sum(len(r.prompt_token_ids) for r in begun), sum(r.sampling.max_tokens for r in begun)

    def habits(self, tier: str) -> TierUsage:
        cached = self._cached[tier].value or 0.0
        return TierUsage(min(cached, CACHED_AT_MOST), self._output[tier].value)
