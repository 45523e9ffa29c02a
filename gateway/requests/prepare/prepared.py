"""A request that is ready to be submitted: its answer's format, and its requests for the scheduler.

Knows bodies, prompts and tiers; does not know HTTP or the scheduler's client.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from gateway.identity import ResolvedTier
from gateway.output.plan import PLAIN, OutputPlan
from gateway.protocol.bodies.schemas import AnyRequest
from gateway.requests.answers.answer import Answer
from gateway.requests.answers.answer_options import AnswerOptions
from gateway.requests.prepare.placement import Placement
from scheduler.config import Tier
from scheduler.request import Delivery, JobPart, Request


@dataclass(frozen=True, slots=True)
class Demotion:
    """The lower tier that serves a request if its own tier cannot serve it in time.

    `answer` and `deadline_ms` replace the values for the request's own tier.
    """

    tier: Tier
    answer: Answer
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated and tokenised request, which is ready to be submitted.

    `requests` holds `n` scheduler requests for each prompt, in the order of the choices' indexes. If `num_kept` is set,
    the answer has only so many choices for each prompt, those with the highest mean log probability.
    """

    placement: Placement
    answer: Answer
    requests: tuple[Request, ...]
    n: int
    options: AnswerOptions = AnswerOptions()
    num_kept: int | None = None
    prompt_texts: tuple[str | None, ...] = (None,)  # the prompts as the client sent them; None: token ids or a chat
    include_usage: bool = False
    continuous_usage: bool = False
    demotion: Demotion | None = None
    is_output_limited: bool = False  # whether the client has set a maximum of output tokens
    output: OutputPlan = PLAIN

    @property
    def tier(self) -> Tier:
        return self.placement.tier

    @property
    def owner(self) -> str | None:
        return self.placement.owner

    @property
    def text_options(self) -> object:
        """What decides how tokens become text, and so where a stop string ends the output. Plain data."""
        return self.options, sorted(self.output.shown.items())

    @property
    def has_own_deadline(self) -> bool:
        """Whether the request must end earlier than its tier asks."""
        return any(r.deadline_ms - r.arrival_ms < self.tier.deadline_ms for r in self.requests)

    def at(self, now_ms: int) -> "PreparedRequest":
        """Return the same request as if it had arrived at `now_ms`."""
        later = [(r, now_ms - r.arrival_ms) for r in self.requests]
        requests = [
            msgspec.structs.replace(r, arrival_ms=now_ms, deadline_ms=r.deadline_ms + by_ms) for r, by_ms in later
        ]
        return replace(self, requests=tuple(requests))

    def demoted(self, to: Demotion) -> "PreparedRequest":
        """Return the same request in the tier of `to`, without a further demotion."""
        own = {"tier": to.tier.name, "deadline_ms": to.deadline_ms}
        requests = tuple(msgspec.structs.replace(request, **own) for request in self.requests)
        placement = replace(self.placement, tier=to.tier)
        return replace(self, placement=placement, answer=to.answer, requests=requests, demotion=None)


class HasDeadline(Protocol):
    """A body that may ask for an earlier deadline than its tier's."""

    @property
    def deadline_ms(self) -> int | None: ...


def demotion(
    to: ResolvedTier | None, answer_as: Callable[[str], Answer], request: HasDeadline, arrival_ms: int
) -> Demotion | None:
    """Return the demotion of a request that arrived at `arrival_ms`. `answer_as` is for a `service_tier`."""
    if to is None:
        return None
    return Demotion(to.tier, answer_as(to.service_tier), arrival_ms + time_limit_ms(request, to.tier))


def time_limit_ms(request: HasDeadline, tier: Tier) -> int:
    """Return the time from arrival to deadline in ms.

    This is the tier's `deadline_ms`. In a tier without a latency SLO, the request's own `deadline_ms` is used if it is
    less.
    """
    if request.deadline_ms is None or tier.is_interactive:
        return tier.deadline_ms
    return min(request.deadline_ms, tier.deadline_ms)


def delivery_of(request: AnyRequest, tier: Tier) -> dict[str, Any]:
    """Return when the worker sends tokens, as fields of the scheduler's request: after each step, or all at the end.

    Tokens are needed after each step for streams and for stop strings. The first one is also needed in interactive
    tiers with a timeout, because there the timeout bounds the TTFT. In the other tiers, it bounds the time to the whole
    answer.
    """
    if request.stream or request.stop_strings:
        return {"delivery": Delivery.EACH_STEP}
    if tier.is_interactive and tier.timeout_ms is not None:
        return {"delivery": Delivery.EACH_STEP, "is_whole": True}
    return {"delivery": Delivery.AT_END}


def as_part_of_job(request: Request, part: JobPart | None, index: int, tier: Tier, model: str) -> Request:
    """Return choice `index` of a part of a job, with the job's deadline. An own, earlier deadline stays.

    `model` tells one version of the model from another: an output is continued only by the model that began it.
    """
    if part is None:
        return request
    name = _name_of_part(part, index, request, model)
    has_own = request.deadline_ms - request.arrival_ms < tier.deadline_ms
    if part.deadline is None or has_own:
        return msgspec.structs.replace(request, job_part=name)
    due = part.deadline
    return msgspec.structs.replace(request, job_part=name, deadline_ms=due.at_ms, urgent_ms=due.urgent_ms)


def _name_of_part(part: JobPart, index: int, request: Request, model: str) -> str:
    """Return a name that is the same each time the part is asked for, unless something changed that decides its output.

    A seed that the caller has not chosen is another one each time: the output may go on with any.
    """
    sampling = request.sampling if request.is_seeded else msgspec.structs.replace(request.sampling, seed=0)
    whole = (part.name, index, model, request.prompt_token_ids, sampling)
    return hashlib.sha256(msgspec.msgpack.encode(whole, order="deterministic")).hexdigest()[:32]
