"""What happens around the generation of an answer: the limits of its API key, the answer cache, and the usage counts.

Knows prepared requests and numbers of tokens; does not know HTTP, the format of answers, or how tokens become text.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gateway.fairness import HeldBytes
from gateway.http.metrics import GatewayMetrics
from gateway.identity import ApiKey, Keyring
from gateway.keys.limits import KeyLimits, Reservation
from gateway.keys.usage import UsageMeter, Use
from gateway.protocol.errors import too_many_open_bytes
from gateway.requests.answers.chunks import Usage
from gateway.requests.generate.answer_cache import AnswerCache, Lookup
from gateway.requests.prepare.placement import CACHE_HEADER
from gateway.requests.prepare.prepared import PreparedRequest
from scheduler.client.token_stream import TokenStream
from scheduler.request import Request, TokenEvent

# Output tokens that a choice reserves of its key's tokens per minute if the request sets no maximum: a usual answer.
# OpenAI reserves nothing for such a request. With nothing, a burst of them would go far beyond the limit.
USUAL_OUTPUT_TOKENS = 256


class Metering:
    def __init__(
        self,
        keyring: Keyring,
        limits: KeyLimits,
        usage: UsageMeter,
        cache: AnswerCache,
        metrics: GatewayMetrics,
        queue_bytes: int,
    ) -> None:
        """`queue_bytes` is how many bytes open requests of interactive tiers may have, and likewise of bulk tiers."""
        self._keyring = keyring
        self._limits = limits
        self._usage = usage
        self._cache = cache
        self._metrics = metrics
        self._held = {is_interactive: HeldBytes(queue_bytes) for is_interactive in (True, False)}

    async def open(self, prepared: PreparedRequest) -> "Account":
        """Look for the answer in the cache if the request asks for it, and take from the limits of its key.

        Raises `ApiError` 429 if a limit is reached, also if the open requests of the owner have too many bytes.
        """
        end = self._hold(prepared)
        try:
            lookup, reservation = await self._open(prepared)
        except BaseException:
            end()
            raise
        return Account(prepared.owner, lookup, reservation, self._limits, self._usage, self._cache, end)

    def _hold(self, prepared: PreparedRequest) -> Callable[[], None]:
        """Count the bytes of a request in the store until the returned function is called."""
        held, owner = self._held[prepared.tier.is_interactive], prepared.owner
        num_bytes = sum(_num_bytes(request) for request in prepared.requests)
        held.add(owner, num_bytes)
        if held.has_too_many(owner):
            held.add(owner, -num_bytes)
            raise too_many_open_bytes()
        return partial(held.add, owner, -num_bytes)

    async def _open(self, prepared: PreparedRequest) -> tuple[Lookup | None, Reservation | None]:
        lookup, cache_ttl_s = None, prepared.placement.cache_ttl_s
        if cache_ttl_s is not None:
            is_seeded = prepared.requests[0].is_seeded
            lookup = await self._cache.look_up(prepared.requests, prepared.text_options, is_seeded, cache_ttl_s)
            self._metrics.answer_cache.labels(lookup.result).inc()
        key, reservation = self._keyring.named(prepared.owner), None
        if prepared.placement.is_limited and key is not None and key.is_limited:
            tokens = 0 if lookup is not None and lookup.is_hit else _tokens_to_reserve(prepared, key)
            reservation = await self._limits.reserve(key, tokens, [request.id for request in prepared.requests])
        return lookup, reservation


@dataclass(frozen=True, slots=True)
class Account:
    """The account of one answer. It is closed when the generation ends, or cancelled if nothing was enqueued."""

    owner: str | None = None
    lookup: Lookup | None = None  # None: the request does not ask for the cache
    reservation: Reservation | None = None  # None: no limit applies
    _limits: KeyLimits | None = field(default=None, repr=False)
    _usage: UsageMeter | None = field(default=None, repr=False)
    _cache: AnswerCache | None = field(default=None, repr=False)
    _end: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        headers = dict(self.reservation.headers) if self.reservation is not None else {}
        return headers if self.lookup is None else headers | {CACHE_HEADER: self.lookup.result}

    @property
    def is_hit(self) -> bool:
        return self.lookup is not None and self.lookup.is_hit

    @property
    def keeps_events(self) -> bool:
        return self.lookup is not None and self.lookup.result == "miss"

    def replay(self, requests: Sequence[Request]) -> TokenStream | None:
        """Return the cached output as the token stream of `requests`; None if it is not cached."""
        if self.lookup is None or self.lookup.event is None:
            return None
        stream = TokenStream(_cancel_nothing, requests)
        stream.deliver(self.lookup.event)
        return stream

    async def cancel(self) -> None:
        self._end()
        await asyncio.shield(self._settle(0))

    async def close(self, tier: str, used: Usage, events: Sequence[TokenEvent]) -> None:
        """Count what the answer has used, correct the reservation, and keep the output for the cache.

        `events` are those of the whole output; empty if it is incomplete.
        """
        self._end()
        if self._usage is not None:
            self._usage.record(self.owner, tier, _use(used, self.is_hit))
        if self.reservation is not None:
            await asyncio.shield(self._settle(0 if self.is_hit else used.prompt_tokens + used.completion_tokens))
        if self._cache is not None and self.lookup is not None and self.keeps_events and events:
            await self._cache.store(self.lookup, events)

    async def _settle(self, used_tokens: int) -> None:
        if self._limits is not None and self.reservation is not None:
            await self._limits.settle(self.reservation, used_tokens)


UNMETERED = Account()


async def _cancel_nothing(request_ids: Sequence[str]) -> None:
    """A cached answer has no request at a worker."""


def _num_bytes(request: Request) -> int:
    """Return about how many bytes a request has in the store: msgpack takes up to 5 bytes for a token."""
    return 5 * len(request.prompt_token_ids) + len(request.sampling.grammar or "")


def _tokens_to_reserve(prepared: PreparedRequest, key: ApiKey) -> int:
    """Return the tokens of all prompts, and the most that the choices may generate.

    For a request without a maximum, a usual answer is reserved, or what the key's limit leaves beside the prompts.
    """
    prompt = sum(len(request.prompt_token_ids) for request in prepared.requests[:: prepared.n])
    output = sum(request.sampling.max_tokens for request in prepared.requests)
    if prepared.is_output_limited:
        return prompt + output
    room = max(0, (key.tokens_per_minute or 0) - prompt)
    return prompt + min(output, USUAL_OUTPUT_TOKENS * len(prepared.requests), room)


def _use(used: Usage, is_hit: bool) -> Use:
    if not is_hit:
        return Use(1, used.prompt_tokens, used.cached_tokens, used.completion_tokens)
    return Use(1, used.prompt_tokens, used.prompt_tokens, used.completion_tokens, 1, used.completion_tokens)
