"""The report on one step: events to send, leases to acknowledge, and latencies to record.

The core makes these plain data, and `scheduler.worker` distributes them. The functions of this module make the data
from the state of a request. Knows request states; does not know queues or metrics.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.interface import FinishReason
from engine.step_time.cost import StepWork
from scheduler.request import Checkpoint, Delivery, EventKind, Lease, Receipt, TokenEvent
from scheduler.request_state import RequestState, Sample, Status


@dataclass(frozen=True, slots=True)
class Ended:
    """The record of a request that has ended."""

    tier: str
    reason: str  # "stop" | "length" | "failed" | "cancelled"
    prompt_tokens: int
    output_tokens: int
    met_slo: bool
    cached_tokens: int = 0  # prompt tokens that were found in the prefix cache
    max_tokens: int = 0  # of the request; 0: not known


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """The lookup of one prompt in the prefix cache: how many tokens were looked up and how many were found."""

    tier: str
    queried_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Reaction:
    """The time from a request's arrival to its first step, as a multiple of the step that ran when it arrived."""

    tier: str
    steps: float


@dataclass(frozen=True, slots=True)
class DraftUse:
    """A draft that the engine has verified: how many tokens it had, and how many of them were accepted."""

    state: RequestState
    num_drafted: int
    num_accepted: int


@dataclass(slots=True)
class Report:
    """Everything that must be sent, acknowledged or recorded after one step."""

    events: dict[str, list[TokenEvent]] = field(default_factory=lambda: defaultdict(list))  # by gateway
    leases: list[Lease] = field(default_factory=list)  # leases of ended requests, to be acknowledged
    checkpoints: list[Checkpoint] = field(default_factory=list)  # of finished parts of jobs
    samples: list[Sample] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # number of new tokens, by tier
    drafts: list[DraftUse] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    lookups: list[PrefixLookup] = field(default_factory=list)
    reactions: list[Reaction] = field(default_factory=list)
    traced: list[RequestState] = field(default_factory=list)  # ended requests that are traced
    sequences: Mapping[str, int] = field(default_factory=dict)  # number of sequences that ran, by tier
    used_s: Mapping[str, float] = field(default_factory=dict)  # engine time by tier, of the part that has just ended
    work: StepWork | None = None  # None: the step's time does not depend on its work alone
    elapsed_s: float = 0.0  # engine time of the whole step
    planned_s: float = 0.0  # time for which the step was planned; 0 if it was suspended
    predicted_s: float = 0.0  # time predicted for `work` before the step-time model learned from this step

    def absorb(self, later: "Report") -> None:
        """Append the events, leases and checkpoints of the report on a later step."""
        for reply_to, events in later.events.items():
            self.events[reply_to] += events
        self.leases += later.leases
        self.checkpoints += later.checkpoints


REPORT_S = 0.1  # minimum seconds between two token events of an answer that nobody reads token by token
MAX_UNSENT_LOGPROBS = 2**12  # of one request; to read so many takes a gateway 1 ms


def is_due(state: RequestState, now: float) -> bool:
    """Return whether the new tokens of a running request must be sent now.

    A stream without a latency SLO gets several tokens in one event, and so does an interactive answer that is sent as a
    whole. With one event per token, they would keep the gateway busy, and the tokens of streams would wait there. An
    answer that is needed at its end comes
    in one event, unless it has so many log probabilities that they would stop the gateway.
    """
    if state.request.delivery is Delivery.AT_END:
        return state.num_unsent_logprobs >= MAX_UNSENT_LOGPROBS
    is_read = state.tier.is_interactive and not state.request.is_whole
    return is_read or state.reported_s is None or now - state.reported_s >= REPORT_S


def receipt_of(state: RequestState, worker_id: str) -> Receipt | None:
    """Return the receipt of a request; None if it has not asked for one, or has no token yet."""
    started_s, first_s, last_s = state.first_scheduled_s, state.first_token_s, state.last_token_s
    if not state.request.wants_receipt or started_s is None or first_s is None or last_s is None:
        return None
    return Receipt(
        worker=worker_id,
        queue_ms=_ms(started_s - state.arrived_s),
        prefill_ms=_ms(first_s - started_s),
        decode_ms=_ms(last_s - first_s),
        paused_ms=_ms(state.paused_s),
        preemptions=state.num_stops,
        suspensions=state.num_suspensions,
        engine_ms=_ms(state.engine_s) if state.engine_s else None,
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def progress_event(state: RequestState, now: float, worker_id: str = "") -> TokenEvent:
    return _tokens_event(state, EventKind.TOKENS, None, now, worker_id)


def finished_event(state: RequestState, reason: FinishReason, now: float, worker_id: str = "") -> TokenEvent:
    return _tokens_event(state, EventKind.FINISHED, reason, now, worker_id)


def _tokens_event(
    state: RequestState, kind: EventKind, reason: FinishReason | None, now: float, worker_id: str
) -> TokenEvent:
    """Return an event with all tokens and log probabilities that were not sent yet, and mark them as sent."""
    index = state.num_reported
    logprobs, prompt_logprobs = state.report_logprobs()
    return TokenEvent(
        request_id=state.id,
        kind=kind,
        index=index,
        token_ids=state.report_tokens(now),
        finish_reason=reason,
        cached_tokens=state.num_cached_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        receipt=receipt_of(state, worker_id),
        vector=state.vector,
        fence=state.fence,
        worker=worker_id if index == 0 else "",
        prompt_tokens=state.num_prompt_tokens,
    )


def last_checkpoint(state: RequestState) -> Checkpoint:
    """Return the whole output of a finished request but its last token, from which a worker gets this token again."""
    return Checkpoint(state.lease, 0, tuple(state.output_token_ids[:-1]))


def failed_event(state: RequestState, error: str, kind: EventKind = EventKind.FAILED, code: str = "") -> TokenEvent:
    return TokenEvent(state.id, kind, index=state.num_reported, error=error, code=code, fence=state.fence)


def lookup(state: RequestState) -> PrefixLookup | None:
    """Return the record of the prefix-cache lookup of a request's prompt.

    Return None if the request asks for prompt logprobs: every prompt token must be computed, so there is no lookup.
    """
    if state.request.sampling.prompt_logprobs is not None:
        return None
    return PrefixLookup(state.tier.name, len(state.request.prompt_token_ids), state.num_cached_tokens or 0)


def ended(state: RequestState, reason: str) -> Ended:
    prompt, output = len(state.request.prompt_token_ids), len(state.output_token_ids)
    met_slo = state.status is Status.FINISHED and state.met_slo()
    cached, max_tokens = state.num_cached_tokens or 0, state.request.sampling.max_tokens
    return Ended(state.tier.name, reason, prompt, output, met_slo, cached, max_tokens)
