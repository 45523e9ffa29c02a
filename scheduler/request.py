"""A request as it travels from gateway to worker, and the token events that travel back.

Both are frozen, plain and msgpack-encodable. Requests know tokens and a tier's name; they do not know HTTP, text or the
model's vocabulary. `RequestState` is the worker's own record of a claimed request.
"""

from dataclasses import dataclass
from enum import Enum

from engine.interface import FinishReason, SamplingParams


class Delivery(Enum):
    """When tokens are reported back."""

    EACH_STEP = "each_step"  # for streams, and where the gateway looks for stop strings
    AT_END = "at_end"  # one event with all tokens, which costs the gateway nothing until then


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate; `n > 1` and lists of prompts become several requests. Times are wall-clock ms."""

    id: str
    tier: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_ms: int  # at the gateway
    deadline_ms: int  # score in the queue's sorted set: earliest deadline first inside a tier
    reply_to: str  # id of the gateway that gets the token events
    delivery: Delivery = Delivery.EACH_STEP
    cache_salt: str = ""  # requests share KV only if it is equal; it holds the caller's identity

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request under lease. `fence` grows with every claim of the same request: a lease with an older fence can be
    neither acked nor renewed. `attempt` counts claims from 1, without those that were released."""

    request: Request
    fence: int
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a request, valid while `fence` is the newest."""

    request_id: str
    fence: int


class EventKind(Enum):
    TOKENS = "tokens"
    FINISHED = "finished"  # may carry the last tokens
    FAILED = "failed"  # this request only; `error` says why
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Progress of one request. `index` is the position of `token_ids[0]` in the whole output, so that after a requeue a
    gateway can drop the tokens that it has already."""

    request_id: str
    kind: EventKind
    index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0  # prompt tokens found in the prefix cache

    @property
    def is_last(self) -> bool:
        return self.kind is not EventKind.TOKENS
