"""A request as it travels from gateway to worker, and the token events that travel back.

Both are frozen, plain and msgpack-encodable. Requests know tokens and a tier's name; they do not know HTTP,
text or the model's vocabulary. `RequestState`, the worker's own record of a claimed request, has one owner:
`SchedulerCore`.
"""

from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """What a worker can do for one tier, said with caution, and what it has to do before. A tier is served behind those
    above it: what is held, and the step, are theirs as well. A rate of 0: not known yet."""

    prompt_tokens: int = 0  # claimed, not computed; those above included
    output_tokens: int = 0  # claimed, may still come at most; those above included
    step_s: float = 0.0  # a step of the decodes there are, those above included
    slots_free: int = 0  # of its batch size; negative: so many wait for one
    drain_per_s: float = 0.0  # requests that end while all slots are taken
    prefill_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0  # all slots together


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A worker's view of one tier, for admission and `/ready`."""

    queued: int = 0  # claimed, not yet started
    running: int = 0
    batch_size: int = 0
    max_wait_ms: float = 0.0
    finished_per_s: float = 0.0
    capacity: TierCapacity | None = None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's heartbeat; it lives in the store for a few seconds only."""

    worker_id: str
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    started_ms: int
    eos_token_ids: tuple[int, ...] = ()
    device: str = ""
    tiers: dict[str, TierStatus] = field(default_factory=dict)
    at_ms: int = 0  # when this was said, by the worker's wall clock
