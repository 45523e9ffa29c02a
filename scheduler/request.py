"""The request that a gateway sends to a worker, and the token events that the worker sends back.

Both are immutable records with plain values that msgpack can encode. A request holds token ids and the name of a tier.
It holds no HTTP, no text except that of a chat with images, and nothing of the model's vocabulary. `RequestState` is
the worker's own record of a claimed request.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

from engine.interface import FinishReason, SamplingParams, TokenLogprobs

# The newest format of a request that this version knows. A new field that changes answers gets the next number, and
# only requests that use the field carry it: workers that do not know the number refuse them by the field's name.
# Requests of version 0 are of gateways that do not answer `EventKind.TAKEN_OVER`.
VERSION = 3
USUAL_VERSION = 1  # of a request that uses no newer field
PAIR_VERSION = 2  # of a pair of texts: `Request.second_from`
CHAT_VERSION = 3  # of a chat with images: `Request.chat`

# Requests of a key in a tier that wait behind no other key's flood: those of one person with a few windows or agents.
OWN_REQUESTS = 4


class Delivery(Enum):
    """The times at which a worker reports new tokens to the gateway."""

    EACH_STEP = "each_step"  # for streams, and for requests whose stop strings the gateway looks for
    AT_END = "at_end"  # one event with all tokens, so that the gateway has no work before the request ends


@dataclass(frozen=True, slots=True)
class JobDeadline:
    """The deadline of a request that is a part of a job: `Request.deadline_ms` and `Request.urgent_ms`."""

    at_ms: int
    urgent_ms: int


@dataclass(frozen=True, slots=True)
class JobPart:
    """A part of a job, which is asked for again if its gateway ends. `name` is the same each time, and its own."""

    name: str
    deadline: JobDeadline | None = None  # None: nothing is promised


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate. A call with `n > 1` or a list of prompts becomes several requests.

    Times are wall-clock ms.
    """

    id: str
    tier: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_ms: int  # at the gateway
    deadline_ms: int
    reply_to: str  # id of the gateway that gets the token events
    delivery: Delivery = Delivery.EACH_STEP
    cache_salt: str = ""  # requests share KV only if their salts are equal; the salt holds the caller's identity
    wants_receipt: bool = False  # token events say what the worker did for the request
    is_seeded: bool = False  # whether the caller chose the seed, and so the tokens
    # Not 0: the request is a part of a job that was admitted as a whole. Its deadline already leaves time for its own
    # work and for the job's work behind it, and it is urgent when less than this many ms are left.
    urgent_ms: int = 0
    # Not empty: the request is a part of a job. What is checkpointed of its output is stored under this name, and not
    # under the request's id, so that a later request for the same part continues it.
    job_part: str = ""
    traceparent: str = ""  # W3C trace context of the gateway's span; empty: the request is not traced

    version: int = 0  # the lowest `VERSION` that a worker must know to serve the request
    owner: str = ""  # name of the caller's API key; the keys of a tier share the engine
    order_ms: int = 0  # see `score_ms`; 0: its deadline
    weight: int = 1  # of its key among those that share the tier
    vocabulary: str = ""  # tells which vocabulary the token ids are of; empty: unknown
    second_from: int = 0  # of a pair of texts: the position of the second one in the prompt
    chat: str = ""  # as `StreamRequest.chat`: a chat with images, for a server that applies its chat template
    # With `Delivery.EACH_STEP`: nobody reads the tokens one by one, so that those after the first may come a little
    # later, several at once.
    is_whole: bool = False

    @property
    def is_delivered_in_parts(self) -> bool:
        """Whether its gateway may have received tokens before its end, and can tell which."""
        in_parts = self.delivery is Delivery.EACH_STEP or self.sampling.logprobs is not None
        return self.version >= 1 and in_parts

    @property
    def score_ms(self) -> int:
        """The request's score in its tier's queue, a sorted set: the least is claimed first."""
        return self.order_ms or self.deadline_ms

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.sampling.max_tokens


def prefix_digests(request: Request, block_size: int) -> tuple[int, ...]:
    """Return the digest of each full block of the prompt, which also covers all blocks before it.

    Requests have equal digests if they would share KV. The last token counts as in no block, because it is never taken
    from a cache. Digests of two processes differ.
    """
    prompt, digests = request.prompt_token_ids, list[int]()
    digest = hash((request.cache_salt, request.sampling.adapter))
    for end in range(block_size, len(prompt), block_size):
        digest = hash((digest, prompt[end - block_size : end]))
        digests.append(digest)
    return tuple(digests)


def is_sampled(traceparent: str) -> bool:
    """Return whether a W3C trace context is one whose spans are recorded; False for an empty one."""
    return bool(traceparent) and bool(int(traceparent[-2:], 16) & 1)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that a worker has claimed and holds a lease for.

    `fence` grows with every claim of the same request: a lease with an older fence can be neither acknowledged nor
    renewed. `attempt` is the number of this claim, counted from 1. Claims that were released do not count, nor do those
    that ended with a worker whose death cannot be the request's fault.
    """

    request: Request
    fence: int
    attempt: int = 1
    output_token_ids: tuple[int, ...] = ()  # what earlier workers have checkpointed of its output
    # Why the worker cannot read the request; empty: it can. `request` has only its id, tier, deadline and gateway then.
    unreadable: str = ""
    # How many of its output tokens its gateway has received. None: nobody has told it since an earlier claim.
    num_received: int | None = 0

    @property
    def is_taken_over(self) -> bool:
        """Whether its gateway must say what it has received before the request begins."""
        return self.num_received is None and self.request.is_delivered_in_parts


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a request. It is valid until another claim of the request gets a newer fence."""

    request_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Output tokens of a request, to be stored by the holder of its lease."""

    lease: Lease
    index: int  # position of `token_ids[0]` in the whole output
    token_ids: tuple[int, ...]


class EventKind(Enum):
    TOKENS = "tokens"
    FINISHED = "finished"  # the event may carry the last tokens
    FAILED = "failed"  # only this request failed; `error` says why
    CANCELLED = "cancelled"
    TAKEN_OVER = "taken_over"  # another worker has claimed the request, and asks what its gateway has received
    # The gateway has given the request up: it shuts down, no worker is alive, or the request was lost. `error` says
    # which. A new attempt may succeed.
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker has done for a request until its newest token.

    The first three times follow each other: from the arrival at the gateway to the first step, to the first token, and
    to the newest token. If the request was given to another worker after a failure, its queue time includes the first
    worker's time.
    """

    worker: str
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    paused_ms: float  # the part of prefill and decode in which the sequence was in no step because it was preempted
    preemptions: int  # number of times that the sequence was paused, swapped out, or lost its KV
    suspensions: int  # how often a step with it was suspended
    engine_ms: float | None = None  # its part of the engine's time; None: the engine is a server that tells nothing


# The code of a request that was given up because its worker died in each attempt at it.
WORKER_DIED = "worker_died"
# The code of a request that the worker cannot read: it is damaged, or of a version that the worker does not know.
UNREADABLE_REQUEST = "unreadable_request"
# The codes of requests that were given up for good: they become dead letters.
GIVEN_UP = frozenset({WORKER_DIED, UNREADABLE_REQUEST})
# The code of a request that the server behind the worker (`engine.streaming`) has refused because of its content.
UPSTREAM_REFUSED = "upstream_refused"
# The code of a request whose log probabilities are more than a gateway can keep.
ANSWER_TOO_LARGE = "answer_too_large"


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event that reports new tokens of one request, its end, or both.

    `index` is the position of `token_ids[0]` in the whole output. It lets a gateway drop the tokens that it already has
    when another worker starts the request again. Fields with their default value are left out of the encoded event.
    """

    request_id: str
    kind: EventKind
    index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    logprobs: tuple[TokenLogprobs, ...] = ()  # one entry for each of `token_ids`, if requested
    # If requested, one entry for each prompt token but the first. Only the event with index 0 has them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    receipt: Receipt | None = None  # if requested
    code: str = ""  # of a failure that programs must recognise, such as `WORKER_DIED`
    vector: bytes = b""  # of a model that is no chat, with the last event: see `SequenceOutput.vector`
    fence: int = 0  # of the lease under which the event was made; 0: it was made by a gateway or an older version
    worker: str = ""  # id of the worker that holds the KV of the prompt; only events with index 0 have it
    prompt_tokens: int = 0  # as `SequenceOutput.num_prompt_tokens`; 0: as many as the request has

    @property
    def is_last(self) -> bool:
        return self.kind not in (EventKind.TOKENS, EventKind.TAKEN_OVER)
