"""What happens around the generation of an answer: the limits of its API key, the answer cache, usage and its cost.

Knows prepared requests and numbers of tokens; does not know HTTP, the format of answers, or how tokens become text.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.fairness import HeldBytes
from gateway.http.metrics import GatewayMetrics
from gateway.identity import ApiKey, Keyring
from gateway.keys.limits import KeyLimits, Reservation
from gateway.keys.prices import FREE, Price
from gateway.keys.usage import Owner, UsageMeter, Use
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

PriceOf = Callable[[str], Price]


class Metering:
    def __init__(
        self,
        keyring: Keyring,
        limits: KeyLimits,
        usage: UsageMeter,
        cache: AnswerCache,
        metrics: GatewayMetrics,
        price_of: PriceOf,
        queue_bytes: int,
    ) -> None:
        """`price_of` returns the price of tokens in a tier of the model.

        `queue_bytes` is how many bytes open requests of interactive tiers may have, and likewise of bulk tiers.
        """
        self._keyring = keyring
        self._limits = limits
        self._usage = usage
        self._cache = cache
        self._metrics = metrics
        self._price_of = price_of
        self._held = {is_interactive: HeldBytes(queue_bytes) for is_interactive in (True, False)}

    async def open(self, prepared: PreparedRequest) -> "Account":
        """Look for the answer in the cache if the request asks for it, and take from the limits of its key.

        Raises `ApiError` 429 if a limit is reached, also if the open requests of the owner have too many bytes.
        """
        end = self._hold(prepared)
        try:
            return await self._open(prepared, end)
        except BaseException:
            end()
            raise

    def _hold(self, prepared: PreparedRequest) -> Callable[[], None]:
        """Count the bytes of a request in the store until the returned function is called."""
        held, owner = self._held[prepared.tier.is_interactive], prepared.owner
        num_bytes = sum(_num_bytes(request) for request in prepared.requests)
        held.add(owner, num_bytes)
        if held.has_too_many(owner):
            held.add(owner, -num_bytes)
            raise too_many_open_bytes()
        return partial(held.add, owner, -num_bytes)

    async def _open(self, prepared: PreparedRequest, end: Callable[[], None]) -> "Account":
        lookup, cache_ttl_s = None, prepared.placement.cache_ttl_s
        if cache_ttl_s is not None:
            is_seeded = prepared.requests[0].is_seeded
            lookup = await self._cache.look_up(prepared.requests, prepared.text_options, is_seeded, cache_ttl_s)
            self._metrics.answer_cache.labels(lookup.result).inc()
        key = self._keyring.named(prepared.owner)
        project = None if key is None or key.project is None else key.project.name
        owner = Owner(prepared.owner, project)
        account = Account(owner, lookup, None, self._limits, self._usage, self._cache, self._price_of, end)
        if key is None or not key.is_limited:
            return account
        if not prepared.placement.is_limited:
            await self._limits.check_budget(key)
            return account
        prompt, output = (0, 0) if account.is_hit else _tokens_to_reserve(prepared, key)
        cost_nano = self._price_of(prepared.tier.name).cost_nano(prompt, 0, output)
        ids = [request.id for request in prepared.requests]
        return replace(account, reservation=await self._limits.reserve(key, prompt + output, ids, cost_nano))


@dataclass(frozen=True, slots=True)
class Account:
    """The account of one answer. It is closed when the generation ends, or cancelled if nothing was enqueued."""

    owner: Owner = Owner()
    lookup: Lookup | None = None  # None: the request does not ask for the cache
    reservation: Reservation | None = None  # None: no limit applies
    _limits: KeyLimits | None = field(default=None, repr=False)
    _usage: UsageMeter | None = field(default=None, repr=False)
    _cache: AnswerCache | None = field(default=None, repr=False)
    _price_of: PriceOf = field(default=lambda tier: FREE, repr=False)
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

    async def cancel(self, tier: str) -> None:
        self._end()
        if self.reservation is not None:
            await self._settle(tier, Use(), 0)

    async def close(self, tier: str, used: Usage, events: Sequence[TokenEvent]) -> None:
        """Count what the answer has used, correct the reservation, and keep the output for the cache.

        `events` are those of the whole output; empty if it is incomplete.
        """
        self._end()
        price = FREE if self.is_hit else self._price_of(tier)
        cost_nano = price.cost_nano(used.prompt_tokens, used.cached_tokens, used.completion_tokens)
        tokens = 0 if self.is_hit else used.prompt_tokens + used.completion_tokens
        await self._settle(tier, _use(used, self.is_hit, cost_nano), tokens)
        if self._cache is not None and self.lookup is not None and self.keeps_events and events:
            await self._cache.store(self.lookup, events)

    async def _settle(self, tier: str, use: Use, tokens: int) -> None:
        """Write down what was used, of which `tokens` count for limits, before the caller has the end of the answer.

        A cancelled caller does not cancel what is being written.
        """
        if self._usage is None or self._limits is None:
            return
        charge = None if self.reservation is None else self.reservation.charge
        self._usage.record(self.owner, tier, use, charge, tokens)
        settled = [] if self.reservation is None else [self._limits.settle(self.reservation, tokens)]
        written = [] if self.owner.key is None else [self._usage.try_flush()]  # nobody is charged for open access
        if written or settled:
            await asyncio.shield(asyncio.gather(*written, *settled))


UNMETERED = Account()


async def _cancel_nothing(request_ids: Sequence[str]) -> None:
    """A cached answer has no request at a worker."""


def _num_bytes(request: Request) -> int:
    """Return about how many bytes a request has in the store: msgpack takes up to 5 bytes for a token."""
    return 5 * len(request.prompt_token_ids) + len(request.sampling.grammar or "") + len(request.chat)


def _tokens_to_reserve(prepared: PreparedRequest, key: ApiKey) -> tuple[int, int]:
    """Return the tokens of all prompts, and the most that the choices may generate.

    The token that the engine generates for a prompt that is only read does not count. For a request without a maximum,
    a usual answer is reserved, or what the limits leave beside the prompts.
    """
    prompt = sum(len(request.prompt_token_ids) for request in prepared.requests[:: prepared.n])
    output = 0 if prepared.options.only_prompt else sum(r.sampling.max_tokens for r in prepared.requests)
    if prepared.is_output_limited:
        return prompt, output
    limits = [holder.tokens_per_minute for holder in key.holders if holder.tokens_per_minute is not None]
    rooms = [max(0, limit - prompt) for limit in limits]
    return prompt, min(output, USUAL_OUTPUT_TOKENS * len(prepared.requests), *rooms)


def _use(used: Usage, is_hit: bool, cost_nano: int) -> Use:
    if not is_hit:
        return Use(1, used.prompt_tokens, used.cached_tokens, used.completion_tokens, cost_nano=cost_nano)
    return Use(1, used.prompt_tokens, used.prompt_tokens, used.completion_tokens, 1, used.completion_tokens, cost_nano)
