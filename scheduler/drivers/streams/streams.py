"""The open streams of a worker: which requests have one, what each has brought, and which may be hung up.

Keeps the states of the requests in step with their streams, and learns the server's pace from what they bring. Does not
decide which streams are opened or hung up. The time is passed in.
"""

from engine.interface import FinishReason, SequenceOutput
from engine.streaming import StreamRequest, Upstream
from scheduler.clock import NEVER_S
from scheduler.drivers.streams.recompute import Recompute
from scheduler.drivers.streams.shared_beginnings import SharedBeginnings
from scheduler.drivers.streams.step_times import SeenStep, UpstreamStepTimes
from scheduler.drivers.streams.stream import Stream, beginning_of, is_stalled, request_of
from scheduler.holdings.request_table import RequestTable
from scheduler.request import Request
from scheduler.request_state import RequestState, Status

# Output tokens for which bulk, or what yields, is sent at a time, where a server caches prefixes: then others may go
# first.
QUANTUM = 64
# Steps of the server after which a request without a token waits for a place, and not only for the next step.
QUEUED_STEPS = 2


def may_continue(upstream: Upstream, request: Request) -> bool:
    """Return whether a stream of `request` may be hung up, and continued from its tokens: not that of a chat which the
    server turns into a prompt itself."""
    return not request.chat and upstream.can_continue(request.sampling, request.is_seeded)


class StreamTable:
    def __init__(
        self, table: RequestTable, upstream: Upstream, step_times: UpstreamStepTimes, recompute: Recompute
    ) -> None:
        self._table = table
        self._recompute = recompute
        self._upstream = upstream
        self._step_times = step_times
        self._streams: dict[str, Stream] = {}
        self._shared = SharedBeginnings(upstream, recompute.misses)
        self._num_steps = 0  # steps of the server that were seen
        self._hung_up: list[str] = []  # ids whose streams the driver must hang up
        self._kept: dict[str, int] = {}  # by request without a stream: its tokens that a prefix cache should have
        self._whole: set[str] = set()  # ids whose prompts are sent whole: the server did not keep a beginning
        self._paused: set[str] = set()  # ids whose last streams brought the part of the answer that was asked for

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    @property
    def awaits_first_token(self) -> bool:
        """Whether an interactive request that yields to nobody has a stream and no token yet."""
        states = self._table.states
        return any(states[i].is_protected and states[i].awaits_first_token for i in self._streams)

    @property
    def num_queued(self) -> int:
        """The number of streams that wait for more than the server's next step, or whose prompts take many steps."""
        before = self._num_steps - QUEUED_STEPS
        return sum(not stream.has_tokens and stream.begun_step < before for stream in self._streams.values())

    def __getitem__(self, request_id: str) -> Stream:
        return self._streams[request_id]

    # -- begin and end -----------------------------------------------------------------------------------------

    def open(self, state: RequestState, now: float, part: int | None = None) -> StreamRequest:
        """Begin a stream of a request.

        With `part`, only so many of its tokens are sent, and one token is asked for that nobody gets: what the server
        then has in its prefix cache is not computed again by the next stream.
        """
        state.move(Status.RUNNING)
        state.resume(now)
        if state.first_scheduled_s is None:
            state.first_scheduled_s = now
        self._table.update(state)
        for other in self._streams.values():
            other.is_alone = False
        until = self._until(state)
        self._streams[state.id] = Stream(
            begun_s=now,
            progress_s=now,
            num_before=len(state.output_token_ids),
            num_known=state.num_tokens,
            num_kept=self.kept(state),
            num_found=self.found(state),
            until=until,
            is_alone=not self._streams,
            begun_step=self._num_steps,
            follows_part=state.id in self._paused,
            part=part,
        )
        self._paused.discard(state.id)
        return request_of(state, until) if part is None else beginning_of(state, part)

    def _until(self, state: RequestState) -> int:
        """Return how many output tokens the request has at the end of its next stream."""
        max_tokens = state.request.sampling.max_tokens
        can_pause = self._is_kept(state) and not state.is_protected and self.can_continue(state)
        in_parts = can_pause and self._recompute.parts.level >= 0
        return min(max_tokens, len(state.output_token_ids) + QUANTUM) if in_parts else max_tokens

    def _is_kept(self, state: RequestState) -> bool:
        return self._upstream.keeps_prefixes(state.request.cache_salt)

    def kept(self, state: RequestState) -> int:
        """Return how many tokens of a request without a stream should be in the server's prefix cache."""
        return self._kept.get(state.id, 0)

    def found(self, state: RequestState) -> int:
        """Return how many tokens of a request, without those of its stream, are likely to be in the prefix cache."""
        stream = self._streams.get(state.id)
        return max(self.kept(state), self._shared.find(state)) if stream is None else stream.num_found

    def lost(self, state: RequestState) -> int:
        """Return how many tokens of a stream the server computes again for the next one, if it ends now."""
        if self.is_unbegun(state):
            return 0
        if not self._is_kept(state):
            return state.num_tokens
        stream, size = self._streams[state.id], self._upstream.info.block_size
        num_cached = stream.num_kept
        if stream.has_tokens:
            num_cached = state.num_tokens if stream.part is None else stream.part
        return state.num_tokens - min(num_cached, state.num_tokens - 1) // size * size  # whole blocks are kept

    def forget(self, request_id: str) -> None:
        """Remove the stream of a request, which has ended."""
        self._streams.pop(request_id, None)
        self._kept.pop(request_id, None)
        self._whole.discard(request_id)
        self._paused.discard(request_id)

    def interrupt(self, state: RequestState, now: float) -> None:
        """Record that a request has lost its stream, and keeps its tokens.

        Where the server keeps what it has computed, this is no loss of KV blocks, of which a request bears few.
        """
        stream, is_kept = self._streams[state.id], self._is_kept(state)
        if is_kept and not self.is_unbegun(state):
            self._kept[state.id] = state.num_tokens - self.lost(state)
        del self._streams[state.id]
        state.stop(now)
        state.lose_blocks(Status.PREEMPTED)
        if is_kept and stream.has_tokens:
            state.num_preemptions -= 1
        self._table.update(state)

    def is_part(self, state: RequestState, output: SequenceOutput) -> bool:
        """Return whether `output` ends a stream that was to bring only a part of the answer.

        The part may be shorter, because llama.cpp does not send the beginning of a character.
        """
        stream = self._streams[state.id]
        is_whole = stream.until >= state.request.sampling.max_tokens
        is_longer = len(state.output_token_ids) + len(output.token_ids) > stream.num_before
        return output.finish_reason is FinishReason.LENGTH and is_longer and not is_whole

    def may_cut(self, state: RequestState) -> bool:
        """Return whether the prompt of a request without a stream may be sent in parts."""
        return self._is_kept(state) and not state.request.chat and state.id not in self._whole

    def loss(self, state: RequestState) -> float:
        """Return how many tokens are lost on average if a request's next stream is hung up; NEVER_S: it cannot be."""
        if state.is_preemption_exhausted or not self.can_continue(state):
            return NEVER_S
        return (self._upstream.info.block_size + 1) / 2 if self.may_cut(state) else state.num_tokens

    def num_sent(self, state: RequestState) -> int:
        """Return how many tokens the server computes or has for a request: all, if it has no stream."""
        stream = self._streams.get(state.id)
        return state.num_tokens if stream is None or stream.part is None else stream.part

    def is_unbegun(self, state: RequestState) -> bool:
        """Return whether the stream of a request was sent since the newest step that was seen of the server."""
        stream = self._streams.get(state.id)
        return stream is not None and not stream.has_tokens and stream.begun_step == self._num_steps

    def pause(self, state: RequestState, now: float) -> None:
        """Record that a part of an answer, or of a prompt, is there."""
        self.interrupt(state, now)
        self._paused.add(state.id)

    def rewind(self, state: RequestState, now: float) -> None:
        """Prepare a request that has lost its stream for the next one.

        It continues from its tokens, or begins again if that would not give the same tokens. The gateway drops the
        tokens that it has already.
        """
        self.interrupt(state, now)
        self._kept.pop(state.id, None)  # the server may have been started anew
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
        if not output.token_ids and (stream.has_tokens or output.finish_reason is None):
            return 0, None
        num_new, num_prefilled = len(output.token_ids), 0
        if not stream.has_tokens:
            num_prefilled = max(1, self.num_sent(state) - max(output.num_cached_tokens, stream.num_found))
            self._shared.note_computed(state, self.num_sent(state))
            if stream.is_alone:
                self._step_times.note_alone(num_prefilled, now - stream.begun_s)
            self._note_begun(state, num_prefilled, now)
        stream.has_tokens = True
        seen = self._step_times.note_tokens(state, num_new, num_prefilled, now)
        self._num_steps += seen is not None
        self._recompute.note_computed(num_new + num_prefilled)
        return num_new + num_prefilled, seen

    def _note_begun(self, state: RequestState, num_prefilled: int, now: float) -> None:
        """Correct when the server began with a request: what is longer than its own prefill was a wait for a step."""
        cost = self._step_times.cost()
        begun_s = now - cost.step(cost.prefill(num_prefilled, 0))
        if state.first_scheduled_s is not None and state.awaits_first_token:
            state.first_scheduled_s = max(state.first_scheduled_s, begun_s)

    def lost_tokens(self, state: RequestState, output: SequenceOutput) -> int:
        """Return how many tokens of a continued request the server had to compute again, beyond what was expected.

        It is negative if there were fewer. The first output of a stream says it, the last one, or each of them.
        """
        stream = self._streams[state.id]
        if stream.part is not None and output.num_cached_tokens < stream.num_kept:
            self._whole.add(state.id)  # each further part would compute all before it again
            return stream.num_kept - output.num_cached_tokens
        if stream.is_cached_known or not (output.num_cached_tokens or output.finish_reason):
            return 0
        stream.is_cached_known = True
        self._shared.note_missed(stream.num_found - max(stream.num_kept, output.num_cached_tokens))
        return stream.num_kept - min(output.num_cached_tokens, stream.num_known) if stream.num_kept else 0

    # -- choices -----------------------------------------------------------------------------------------------

    def stalled(self, stall_s: float, now: float) -> list[RequestState]:
        """Return the requests whose streams have brought nothing for too long, and wait for no place.

        Beyond `stall_s`, a server has the time that it needs for the prompts which it has.
        """
        states, cost = self._table.states, self._step_times.cost()
        pairs = [(states[request_id], stream) for request_id, stream in self._streams.items()]
        prompts = [self.num_sent(state) - stream.num_kept for state, stream in pairs if not stream.has_tokens]
        limit_s = stall_s + sum(cost.prefill(num_tokens, 0) for num_tokens in prompts)
        return [state for state, stream in pairs if is_stalled(state, stream, pairs, limit_s, now)]

    def evictable(self) -> list[RequestState]:
        """Return the streams of bulk, and of what yields, that may be hung up.

        Each has brought a token, and can be continued.
        """
        states = [self._table.states[request_id] for request_id in self._streams]
        found = [state for state in states if not state.is_protected and self._may_hang_up(state)]
        return sorted(found, key=lambda s: (s.priority, -self._streams[s.id].begun_s, s.id))

    def can_continue(self, state: RequestState) -> bool:
        return may_continue(self._upstream, state.request)

    def _may_hang_up(self, state: RequestState) -> bool:
        grown = len(state.output_token_ids) - self._streams[state.id].num_before
        is_spared = not grown or state.is_preemption_exhausted
        return not is_spared and self.can_continue(state)
