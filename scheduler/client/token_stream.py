"""The stream of the token events of one `submit`, in order and without repeats.

Knows requests and events; does not know where the events come from, or how a cancel reaches the workers.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from scheduler.request import ANSWER_TOO_LARGE, Checkpoint, EventKind, Lease, Request, TokenEvent

Cancel = Callable[[Sequence[str]], Awaitable[None]]
MAX_LOGPROBS = 2**22  # of all streams together; about 200 bytes each, as objects and as JSON


class HeldLogprobs:
    """The number of log probabilities that all streams hold until their clients have them, with a limit.

    Tokens are bounded by the limits of queues and outputs. Log probabilities are not: each token may have 21 of them,
    and an answer of 1,024 choices has millions.
    A stream may hold at most twice as many as are free, so some always stay free.
    """

    def __init__(self, limit: int = MAX_LOGPROBS) -> None:
        self.limit = limit
        self._free = limit

    def has_room(self, held: int, more: int) -> bool:
        """Return whether a stream that holds `held` may take `more`."""
        return held + more <= 2 * (self._free - more)

    def hold(self, count: int) -> None:
        self._free -= count

    def release(self, count: int) -> None:
        self._free += count


class TokenStream:
    """The token events of all requests of one `submit`.

    Use it as `async with stream: await stream.receive(timeout_s)`, or event by event with `async for event in stream`.
    Each request gets its tokens in order, without gaps or repeats, and exactly one last event. Leaving the `async with`
    block early cancels the unfinished requests.

    If the log probabilities take too much memory, the stream ends with an event of one request that says so. They count
    in `held` until they are forgotten, or the block ends.
    """

    def __init__(self, cancel: Cancel, requests: Sequence[Request], held: HeldLogprobs | None = None) -> None:
        self.tier = requests[0].tier
        self._cancel = cancel
        self._held = held or HeldLogprobs()
        self._num_logprobs = 0  # of this stream in `held`
        self._received: dict[str, list[int]] = {r.id: [] for r in requests}
        self._max_tokens = {r.id: r.sampling.max_tokens for r in requests}
        self._fences: dict[str, int] = {}  # the newest fence of an event, by request
        self._delivered_fences: dict[str, int] = {}  # the fence of the newest event that was delivered, by request
        self._starts: dict[str, int] = {}  # where the next claim was told to start, by request; or it starts at 0
        self._contradicted_at: dict[str, int] = {}  # that start, if the claim before it did not follow, by request
        self._unfinished = set(self._received)
        self._failed: list[str] = []  # ids of requests that this stream has failed and must still cancel
        self._events: list[TokenEvent] = []  # events that were not received yet
        self._waiter: asyncio.Future[None] | None = None  # of the one caller that waits for events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unfinished = sorted({*self._unfinished, *self._failed})
        self._unfinished.clear()
        self._events.clear()
        self.forget_received()
        if unfinished:
            await asyncio.shield(self._cancel(unfinished))

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events and self._unfinished:
            await self._wait(None)
        if not self._events:
            raise StopAsyncIteration
        await self._cancel_failed()
        return self._events.pop(0)

    async def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """Wait for at least one event, and return all events that have arrived.

        Return an empty list after `timeout_s` without an event (None: no limit). Raises `EOFError` if every request has
        ended and all events were received.
        """
        if not self._events and self._unfinished:
            await self._wait(timeout_s)
        if not (self._events or self._unfinished):
            raise EOFError("the token stream has ended")
        await self._cancel_failed()
        events, self._events = self._events, []
        return events

    def forget_received(self) -> None:
        """Note that the log probabilities of all events that were received are no longer in memory."""
        left = sum(map(_count_logprobs, self._events))
        self._held.release(self._num_logprobs - left)
        self._num_logprobs = left

    async def cancel(self, request_id: str) -> None:
        """Stop one request that needs no more tokens, for example after a stop string matched.

        The stream yields no further event of this request.
        """
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            self._events = [event for event in self._events if event.request_id != request_id]
            if not self._unfinished:
                self._wake()
            await self._cancel([request_id])

    def is_outdated(self, event: TokenEvent) -> bool:
        """Return whether the worker that made `event` had lost the request's lease, and note the event's fence."""
        newest = self._fences.get(event.request_id, 0)
        self._fences[event.request_id] = max(newest, event.fence)
        return 0 < event.fence < newest

    def must_go_on_anew(self, event: TokenEvent) -> bool:
        """Return whether a worker's `event` does not follow the received tokens, and another claim may go on from them.

        Tokens between were lost on the way; or the store has lost that there are tokens, and they were generated again
        and differ. A worker that was told the received tokens, and then contradicts the same ones, cannot go on.
        """
        num_received = len(self._received[event.request_id])
        if event.index == num_received and event.fence == self._delivered_fences.get(event.request_id):
            return False  # the usual case: the next tokens of a claim
        is_told = self._contradicted_at.get(event.request_id) == num_received
        contradicts = (self._contradicts(event) and not is_told) or self._starts_late(event)
        return event.fence > 0 and (event.index > num_received or contradicts)

    def _starts_late(self, event: TokenEvent) -> bool:
        """Return whether the first tokens of a claim do not start where a claim may start.

        Then tokens before them were lost on the way, and these may differ from the received ones.
        """
        request_id = event.request_id
        is_first = event.fence != self._delivered_fences.get(request_id)
        has_tokens = event.kind in (EventKind.TOKENS, EventKind.FINISHED)
        return is_first and has_tokens and event.index not in (0, self._starts.get(request_id))

    def received(self, event: TokenEvent) -> Checkpoint:
        """Return all tokens of a request that have arrived, for the holder of the lease under which `event` was made.

        If the event brought tokens, its lease ends with this, so its further events are outdated.
        """
        request_id, fence = event.request_id, event.fence
        tokens = tuple(self._received[request_id])
        self._starts[request_id] = len(tokens)
        if event.kind is not EventKind.TAKEN_OVER:  # such a question may come again
            self._fences[request_id] = fence + 1
            self._contradicted_at[request_id] = len(tokens)
        return Checkpoint(Lease(request_id, fence), 0, tokens)

    def has_all(self, request_id: str) -> bool:
        """Return whether a request has as many tokens as it may get, and only its end is missing."""
        return len(self._received[request_id]) >= self._max_tokens[request_id]

    def deliver(self, event: TokenEvent) -> None:
        """Add `event` to the stream, without the tokens that were received before."""
        if event.request_id not in self._unfinished:
            return
        self._delivered_fences[event.request_id] = event.fence
        follows = event.index <= len(self._received[event.request_id]) and not self._contradicts(event)
        new = self._without_repeats(event) if follows else self._fail_diverged(event.request_id)
        if not (new.token_ids or new.is_last):
            return
        new = self._hold(new)
        if new.is_last:
            self._unfinished.discard(event.request_id)
        self._events.append(new)
        self._wake()

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait until an event comes or no event will come any more, but no longer than `timeout_s`.

        This runs for each token of a stream, so it is a future and a timer, and no `asyncio.timeout`.
        """
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _cancel_failed(self) -> None:
        if self._failed:
            failed, self._failed = self._failed, []
            await self._cancel(failed)

    def _hold(self, event: TokenEvent) -> TokenEvent:
        """Count the log probabilities of `event` and return it. If they are too many, return the request's failure."""
        count = _count_logprobs(event)
        if not count:
            return event
        if self._held.has_room(self._num_logprobs, count):
            self._held.hold(count)
            self._num_logprobs += count
            return event
        is_large = 3 * (self._num_logprobs + count) > self._held.limit
        self._failed += sorted({*self._unfinished, event.request_id})  # the answer is for nothing without this request
        self._unfinished.clear()
        self._events.clear()
        self.forget_received()
        if not is_large:
            text = "The log probabilities of other answers take the memory that this one needs."
            return TokenEvent(event.request_id, EventKind.UNAVAILABLE, event.index, error=text)
        text = (
            f"The answer has more log probabilities than the server can keep, which are {self._held.limit} for all. Ask"
            " for fewer tokens, choices or log probabilities, or read it as a stream."
        )
        return TokenEvent(event.request_id, EventKind.FAILED, event.index, error=text, code=ANSWER_TOO_LARGE)

    def _overlap(self, event: TokenEvent) -> list[int]:
        """Return the tokens already received at the positions that `event` covers."""
        received = self._received[event.request_id]
        return received[event.index : event.index + len(event.token_ids)] if event.index < len(received) else []

    def _contradicts(self, event: TokenEvent) -> bool:
        """Return whether `event` has other tokens than the received ones, so that the answer would be a mixture.

        A worker that begins again sends all tokens from index 0. The same seed normally gives the same tokens.
        """
        overlap = self._overlap(event)
        return bool(overlap) and list(event.token_ids[: len(overlap)]) != overlap

    def _fail_diverged(self, request_id: str) -> TokenEvent:
        self._failed.append(request_id)
        text = "The generation was interrupted and could not be continued."
        return TokenEvent(request_id, EventKind.FAILED, index=len(self._received[request_id]), error=text)

    def _without_repeats(self, event: TokenEvent) -> TokenEvent:
        """Return `event` with only its new tokens and their log probabilities, and record the tokens as received."""
        received = self._received[event.request_id]
        is_continued = bool(received)
        if event.index == len(received) and not (is_continued and event.prompt_logprobs):
            received.extend(event.token_ids)
            return event
        num_known = len(self._overlap(event))
        new = event.token_ids[num_known:]
        received.extend(new)
        return TokenEvent(
            request_id=event.request_id,
            kind=event.kind,
            index=len(received) - len(new),
            token_ids=new,
            finish_reason=event.finish_reason,
            error=event.error,
            code=event.code,
            cached_tokens=event.cached_tokens,
            receipt=event.receipt,
            vector=event.vector,
            prompt_tokens=event.prompt_tokens,
            logprobs=event.logprobs[num_known:],
            prompt_logprobs=() if is_continued else event.prompt_logprobs,
        )


def _count_logprobs(event: TokenEvent) -> int:
    return sum(1 + len(found.top) for found in (*event.logprobs, *event.prompt_logprobs))
