"""One stream of a request: what is sent, what it has brought, and when it counts as lost. The time is passed in."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from engine.interface import SamplingParams
from engine.streaming import StreamRequest
from scheduler.request_state import RequestState


@dataclass(slots=True)
class Stream:
    """One stream of a request. Only `StreamTable` changes it."""

    begun_s: float
    progress_s: float  # time of the newest tokens, or of the begin
    num_before: int  # output tokens that the request had before this stream
    num_known: int  # tokens of the request before this stream, with its prompt
    num_kept: int  # how many of these should be in the server's prefix cache, from an earlier stream
    num_found: int  # how many are likely to be there, with what other requests have left
    until: int  # output tokens of the request at which this stream ends
    is_alone: bool  # whether no other stream has run since this one began
    begun_step: int  # number of the server's steps that were seen before
    follows_part: bool  # whether the stream before it ended by itself, and was not hung up
    part: int | None = None  # tokens of the beginning of a prompt that are sent to be cached; None: all are sent
    has_tokens: bool = False
    is_cached_known: bool = False  # whether it was told how many of its tokens were found in the prefix cache


def request_of(state: RequestState, until: int) -> StreamRequest:
    """Return what is sent for a request, whose answer is to have `until` tokens at the end of the stream."""
    request = state.request
    return StreamRequest(
        seq_id=state.id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=structs.replace(request.sampling, max_tokens=until),
        cache_salt=request.cache_salt,
        priority=state.tier.priority,
        is_seeded=request.is_seeded,
        output_token_ids=tuple(state.output_token_ids),
        second_from=request.second_from,
        traceparent=request.traceparent,
        chat=request.chat,
    )


def beginning_of(state: RequestState, num_tokens: int) -> StreamRequest:
    """Return what is sent so that the server caches the first `num_tokens` tokens of a request."""
    request = state.request
    return StreamRequest(
        seq_id=state.id,
        prompt_token_ids=(*request.prompt_token_ids, *state.output_token_ids)[:num_tokens],
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        cache_salt=request.cache_salt,
        priority=state.tier.priority,
        traceparent=request.traceparent,
    )


def is_stalled(
    state: RequestState,
    stream: Stream,
    streams: Sequence[tuple[RequestState, Stream]],
    stall_s: float,
    now: float,
) -> bool:
    """Return whether a stream has brought nothing for more than `stall_s`, and waits for no place at the server.

    After a lost stream, the next one has as much time again for its first token: its prompt may take longer than is
    known. `streams` are all open ones, with their requests.
    """
    if not stream.has_tokens:
        stall_s *= 1 + state.num_lost_streams
    return now - stream.progress_s > stall_s and not _waits(state, stream, streams, now - stall_s)


def _waits(state: RequestState, stream: Stream, streams: Sequence[tuple[RequestState, Stream]], since_s: float) -> bool:
    """Return whether a request waits in the server's own queue: only earlier ones, or higher ones, have tokens.

    One of them must have brought some after `since_s`.
    """
    served = [(one, other) for one, other in streams if other.has_tokens]
    is_overtaken = any(
        other.begun_s > stream.begun_s and one.tier.priority <= state.tier.priority for one, other in served
    )
    is_serving = any(other.progress_s >= since_s for _, other in served)
    return not stream.has_tokens and is_serving and not is_overtaken
