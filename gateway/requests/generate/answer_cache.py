"""The exact answer cache: outputs of requests that would give the same output again, for callers that ask for it.

What is cached is what the worker has sent, as one token event. It is replayed through the code that answers every
request, so a cached answer has its own id and time, can be streamed or not, and is formatted as this request asks.

The key of an output is a hash over everything that decides it: the whole scheduler request (prompt tokens, all sampling
parameters, the grammar, and the salt, which holds the API key's name), the options by which its tokens become text (a
stop string ends the output where the text has it), and the model with its revision. Only what never changes an output
is left out, so that a parameter which is added later is part of the key unless it is named here. The chat template has
done its work in the prompt tokens. What is in none of these is formatting, which happens at the replay.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.store_keys import GatewayKeys
from scheduler.clock import Clock
from scheduler.request import Delivery, Request, TokenEvent
from scheduler.store.scripts import load_script

log = structlog.get_logger(__name__)


# The fields of a scheduler request that do not change its output: who, when, and how it is served.
_NEUTRAL: dict[str, Any] = {
    "id": "",
    "tier": "",
    "arrival_ms": 0,
    "deadline_ms": 0,
    "reply_to": "",
    "delivery": Delivery.AT_END,
    "is_whole": False,
    "wants_receipt": False,
    "is_seeded": False,
}


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a request that asked for the cache. `result` is the value of the answer's header."""

    result: str  # hit, miss or bypass
    key: str = ""
    ttl_s: int = 0
    event: TokenEvent | None = None  # of a hit: the whole output

    @property
    def is_hit(self) -> bool:
        return self.result == "hit"


BYPASS = Lookup("bypass")


class AnswerCache:
    """The cache of all gateways of a store. `model` names the model and its revision.

    Values are kept for at most `max_ttl_s` seconds, and have at most `max_bytes` bytes together.
    """

    def __init__(self, redis: Redis, clock: Clock, model: str, *, max_ttl_s: int, max_bytes: int) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._clock = clock
        self._model = model
        self._max_ttl_s = max_ttl_s
        self._max_bytes = max_bytes
        self._remember = load_script(redis, "gateway.requests.generate", "remember")

    async def look_up(self, requests: Sequence[Request], text_options: object, is_seeded: bool, ttl_s: int) -> Lookup:
        """Return the cached output of a request of one choice.

        `text_options` is plain data: all that decides how the tokens become text. `is_seeded` says whether the client
        has set the seed. An answer that would differ the next time is not cached: one of several choices, or one that
        is sampled without a seed.
        """
        is_repeatable = len(requests) == 1 and (is_seeded or requests[0].sampling.temperature == 0)
        if not is_repeatable or self._max_bytes == 0:
            return BYPASS
        key = self._keys.cached + self._hash(requests[0], text_options)
        event = _replayed(await self._redis.get(key), requests[0])
        return Lookup("miss", key, min(ttl_s, self._max_ttl_s)) if event is None else Lookup("hit", key, event=event)

    async def store(self, lookup: Lookup, events: Sequence[TokenEvent]) -> None:
        """Keep the output of a request that was missed. If the store does not answer, the output is not kept."""
        value = msgspec.msgpack.encode(_joined(events))
        if len(value) > self._max_bytes:
            return
        index, sizes = self._keys.cache_index, self._keys.cache_sizes
        args: list[int | bytes] = [self._clock.wall_ms(), 1000 * lookup.ttl_s, self._max_bytes, value]
        try:
            await self._remember(keys=[index, sizes, lookup.key], args=args)
        except RedisError as error:
            log.warning("an answer is not cached", error=str(error))

    def _hash(self, request: Request, text_options: object) -> str:
        sampling = request.sampling
        if sampling.temperature == 0:  # greedy: no random number is drawn
            sampling = msgspec.structs.replace(sampling, seed=0)
        output = msgspec.structs.replace(request, sampling=sampling, **_NEUTRAL)
        whole = msgspec.msgpack.encode((self._model, output, text_options), order="deterministic")
        return hashlib.sha256(whole).hexdigest()


def _joined(events: Sequence[TokenEvent]) -> dict[str, Any]:
    """Return one event, as plain data, with the tokens of all `events` and all else that the last of them says."""
    joined: dict[str, Any] = {}
    for event in events:
        for name, value in msgspec.to_builtins(event).items():
            is_sequence = isinstance(value, list | tuple)
            joined[name] = [*joined.get(name, ()), *value] if is_sequence else value
    return joined | {"index": events[0].index}


def _replayed(stored: Any, request: Request) -> TokenEvent | None:
    """Return the stored event as one of `request`; None if there is none, or another version has stored it.

    It has no receipt, because no worker has done anything for this request.
    """
    if stored is None:
        return None
    own = {"request_id": request.id, "receipt": None}
    try:
        event = msgspec.convert(msgspec.msgpack.decode(stored) | own, TokenEvent)
        num_prompt = event.prompt_tokens or len(request.prompt_token_ids)
        return msgspec.structs.replace(event, cached_tokens=num_prompt)
    except msgspec.ValidationError:
        return None
