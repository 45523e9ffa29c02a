"""What a request's progress looks like from outside: its token events, its lookup in the prefix cache, its end.

Reads a state and marks its tokens as sent; decides nothing and sends nothing.
"""

from engine.interface import FinishReason
from scheduler.report import Ended, PrefixLookup
from scheduler.request import Delivery, EventKind, TokenEvent
from scheduler.states import RequestState, Status

BULK_REPORT_S = 0.1  # between two token events of a stream without a latency promise


def is_due(state: RequestState, now: float) -> bool:
    """A stream without a latency promise gets its tokens a few at a time: reported one by one, those of a full bulk
    batch would keep the gateway busy while interactive ones wait their turn there."""
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
    """None where nothing was looked up."""
    if state.request.sampling.prompt_logprobs is not None:
        return None
    return PrefixLookup(state.tier.name, len(state.request.prompt_token_ids), state.num_cached_tokens or 0)


def ended(state: RequestState, reason: str, now: float) -> Ended:
    prompt, output = len(state.request.prompt_token_ids), len(state.output_token_ids)
    met_slo = state.status is Status.FINISHED and state.met_slo()
    return Ended(state.tier.name, reason, prompt, output, met_slo, now - state.claimed_s)
