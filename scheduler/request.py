"""A request as it travels from gateway to worker, and the token events that travel back.

Both are frozen, plain and msgpack-encodable. Requests know tokens and a tier's name; they do not know HTTP,
text or the model's vocabulary. `RequestState`, the worker's own record of a claimed request, has one owner:
`SchedulerCore`.
"""

from dataclasses import dataclass
from enum import Enum

from engine.interface import FinishReason, SamplingParams


class Delivery(Enum):
    """When tokens are reported back."""

    EACH_STEP = "each_step"  # streams, and whoever must look for stop strings
    AT_END = "at_end"  # one event with all tokens: costs the gateway nothing until then


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate; `n > 1` and prompt lists are as many requests. Times are wall-clock ms."""

    id: str
    tier: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_ms: int  # at the gateway
    deadline_ms: int  # the sorted set's score: earliest deadline first inside a tier
    reply_to: str  # the gateway whose event stream gets the tokens
    delivery: Delivery = Delivery.EACH_STEP
    cache_salt: str = ""  # only requests of the same one may share KV: it holds the caller's identity

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request under lease. `fence` grows with every claim of the same request: whoever holds an older one
    can no longer ack or renew it. `attempt` counts claims from 1, without those that were released."""

    request: Request
    fence: int
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a request; `fence` must be the newest for it to count."""

    request_id: str
    fence: int


class EventKind(Enum):
    TOKENS = "tokens"
    FINISHED = "finished"  # may carry the last tokens
    FAILED = "failed"  # this request only; `error` says why
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Progress of one request. `index` is the position of `token_ids[0]` in the whole output, so that a
    gateway can drop what it already has after a requeue."""

    request_id: str
    kind: EventKind
    index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def is_last(self) -> bool:
        return self.kind is not EventKind.TOKENS
