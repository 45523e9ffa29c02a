"""What one step means outside the core: events to send, leases to acknowledge, latencies to record.

Plain data that the core makes and `scheduler.worker` distributes, and the functions that make it from a request's
state. Knows neither queues nor metrics.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.interface import FinishReason
from engine.step_time.cost import StepWork
from scheduler.request import Delivery, EventKind, Lease, TokenEvent
from scheduler.request_state import RequestState, Sample, Status


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended."""

    tier: str
    reason: str  # "stop" | "length" | "failed" | "cancelled"
    prompt_tokens: int
    output_tokens: int
    met_slo: bool
    held_s: float = 0.0  # since it was claimed


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """One prompt's lookup in the prefix cache, in tokens."""

    tier: str
    queried_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Reaction:
    """The time from an arrival during a step to the first step with that request, in lengths of the former step."""

    tier: str
    steps: float


@dataclass(slots=True)
class StepReport:
    events: dict[str, list[TokenEvent]] = field(default_factory=lambda: defaultdict(list))  # by gateway
    leases: list[Lease] = field(default_factory=list)  # of ended requests: to be acknowledged
    samples: list[Sample] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    lookups: list[PrefixLookup] = field(default_factory=list)
    reactions: list[Reaction] = field(default_factory=list)
    sequences: Mapping[str, int] = field(default_factory=dict)  # sequences that ran, by tier
    used_s: Mapping[str, float] = field(default_factory=dict)  # engine time that was of use, by tier
    work: StepWork | None = None  # None: the step's time says nothing about its work
    predicted_s: float = 0.0  # prediction of the time that `work` takes, from before the result

    def absorb(self, later: "StepReport") -> None:
        """Append a later step's events and leases."""
        for reply_to, events in later.events.items():
            self.events[reply_to] += events
        self.leases += later.leases


BULK_REPORT_S = 0.1  # s between two token events of a stream without a latency SLO


def is_due(state: RequestState, now: float) -> bool:
    """Return whether new tokens of a running request are to be sent now. Streams without a latency SLO get several
    tokens at a time: sent one by one, the tokens of a full bulk batch would keep the gateway busy while interactive
    ones wait there."""
    if state.request.delivery is Delivery.AT_END:
        return False
    return state.tier.is_interactive or state.reported_s is None or now - state.reported_s >= BULK_REPORT_S


def progress_event(state: RequestState, now: float) -> TokenEvent:
    return TokenEvent(
        request_id=state.id,
        kind=EventKind.TOKENS,
        index=state.num_reported,
        token_ids=state.report_tokens(now),
        cached_tokens=state.num_cached_tokens or 0,
    )


def finished_event(state: RequestState, reason: FinishReason, now: float) -> TokenEvent:
    return TokenEvent(
        request_id=state.id,
        kind=EventKind.FINISHED,
        index=state.num_reported,
        token_ids=state.report_tokens(now),
        finish_reason=reason,
        cached_tokens=state.num_cached_tokens or 0,
    )


def failed_event(state: RequestState, error: str) -> TokenEvent:
    return TokenEvent(state.id, EventKind.FAILED, index=state.num_reported, error=error)


def lookup(state: RequestState) -> PrefixLookup | None:
    """Return the lookup of a request's prompt, or None if its prompt is not looked up: prompt logprobs need every
    prompt token computed."""
    if state.request.sampling.prompt_logprobs is not None:
        return None
    return PrefixLookup(state.tier.name, len(state.request.prompt_token_ids), state.num_cached_tokens or 0)


def ended(state: RequestState, reason: str, now: float) -> Ended:
    prompt, output = len(state.request.prompt_token_ids), len(state.output_token_ids)
    met_slo = state.status is Status.FINISHED and state.met_slo()
    return Ended(state.tier.name, reason, prompt, output, met_slo, now - state.claimed_s)
