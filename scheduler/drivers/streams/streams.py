"""The open streams of a worker: which requests have one, what each has brought, and which may be hung up.

Keeps the states of the requests in step with their streams, and learns the server's pace from what they bring. Does not
decide which streams are opened or hung up. The time is passed in.
"""

from dataclasses import dataclass

from engine.interface import SequenceOutput
from engine.streaming import StreamRequest, Upstream
from scheduler.drivers.streams.step_times import SeenStep, UpstreamStepTimes
from scheduler.holdings.request_table import RequestTable
from scheduler.request_state import RequestState, Status


@dataclass(slots=True)
class Stream:
    """One stream of a request. Only `StreamTable` changes it."""

    begun_s: float
    progress_s: float  # time of the newest tokens, or of the begin
    num_before: int  # output tokens that the request had before this stream
    is_alone: bool  # whether no other stream has run since this one began
    has_tokens: bool = False


class StreamTable:
    def __init__(self, table: RequestTable, upstream: Upstream, step_times: UpstreamStepTimes) -> None:
        self._table = table
        self._upstream = upstream
        self._step_times = step_times
        self._streams: dict[str, Stream] = {}
        self._hung_up: list[str] = []  # ids whose streams the driver must hang up

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    @property
    def awaits_first_token(self) -> bool:
        """Whether an interactive request has a stream and no token yet."""
        states = self._table.states
        return any(states[i].tier.is_interactive and states[i].awaits_first_token for i in self._streams)

    def begun_s(self, request_id: str) -> float:
        """Return when the stream of a request was begun."""
        return self._streams[request_id].begun_s

    # -- begin and end -----------------------------------------------------------------------------------------

    def open(self, state: RequestState, now: float) -> StreamRequest:
        request = state.request
        state.move(Status.RUNNING)
        state.resume(now)
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now
        self._table.update(state)
        for other in self._streams.values():
            other.is_alone = False
        self._streams[state.id] = Stream(now, now, len(state.output_token_ids), not self._streams)
        return StreamRequest(
            seq_id=state.id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            priority=state.tier.priority,
            is_seeded=request.is_seeded,
            output_token_ids=tuple(state.output_token_ids),
            traceparent=request.traceparent,
        )

    def forget(self, request_id: str) -> None:
        """Remove the stream of a request, which has ended."""
        self._streams.pop(request_id, None)

    def interrupt(self, state: RequestState, now: float) -> None:
        """Record that a request has lost its stream, and keeps its tokens."""
        self.forget(state.id)
        state.stop(now)
        state.lose_blocks(Status.PREEMPTED)
        self._table.update(state)

    def rewind(self, state: RequestState, now: float) -> None:
        """Prepare a request that has lost its stream for the next one.

        It continues from its tokens, or begins again if that would not give the same tokens. The gateway drops the
        tokens that it has already.
        """
        self.interrupt(state, now)
        if not self.can_continue(state):
            state.output_token_ids.clear()
            state.report_logprobs()
            state.num_reported = 0

    def cannot_go_on(self, state: RequestState) -> bool:
        """Return whether the client has tokens of a request that no other stream would go on with."""
        can_go_on = self.can_continue(state) or self._upstream.can_repeat(state.request.sampling)
        return state.num_reported > 0 and not can_go_on

    def note_hang_up(self, request_id: str) -> None:
        """Record that the driver must hang up the stream of a request."""
        self._hung_up.append(request_id)

    def is_hung_up(self, request_id: str) -> bool:
        return request_id in self._hung_up

    def pop_hung_up(self) -> list[str]:
        """Return the ids whose streams the driver must hang up, each once."""
        hung_up, self._hung_up = self._hung_up, []
        return hung_up

    # -- tokens ------------------------------------------------------------------------------------------------

    def learn(self, state: RequestState, output: SequenceOutput, now: float) -> tuple[int, SeenStep | None]:
        """Record the tokens that a stream brought; `state` does not have them yet.

        Return the number of tokens that the server computed for them: more than came with the first tokens of the
        stream. Also return a step of the server, if one is complete now.
        """
        stream = self._streams[state.id]
        stream.progress_s = now
        if not output.token_ids:
            return 0, None
        num_new, num_prefilled = len(output.token_ids), 0
        if not stream.has_tokens:
            num_prefilled = max(1, state.num_tokens - output.num_cached_tokens)
            if stream.is_alone:
                self._step_times.note_alone(num_prefilled, now - stream.begun_s)
        stream.has_tokens = True
        return num_new + num_prefilled, self._step_times.note_tokens(state, num_new, num_prefilled, now)

    # -- choices -----------------------------------------------------------------------------------------------

    def stalled(self, stall_s: float, now: float) -> list[RequestState]:
        """Return the requests whose streams have brought nothing for more than `stall_s`."""
        return [self._table.states[i] for i, s in self._streams.items() if now - s.progress_s > stall_s]

    def evictable(self) -> list[RequestState]:
        """Return the streams of bulk that may be hung up: each has grown by a KV block, and can be continued."""
        states = [self._table.states[request_id] for request_id in self._streams]
        found = [state for state in states if not state.tier.is_interactive and self._may_hang_up(state)]
        return sorted(found, key=lambda s: (s.priority, -self._streams[s.id].begun_s, s.id))

    def can_continue(self, state: RequestState) -> bool:
        return self._upstream.can_continue(state.request.sampling, state.request.is_seeded)

    def _may_hang_up(self, state: RequestState) -> bool:
        grown = len(state.output_token_ids) - self._streams[state.id].num_before
        is_spared = grown < self._upstream.info.block_size or state.is_preemption_exhausted
        return not is_spared and self.can_continue(state)
