"""The token events of one submit, merged and without repeats: what an answer is made from.

Knows requests and events; does not know where these come from, nor how a cancel travels.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from scheduler.request import EventKind, Request, TokenEvent

Cancel = Callable[[Sequence[str]], Awaitable[None]]


class Generation:
    """The token events of one `submit`, merged. Use as `async with generation as events: async for e in events`.

    Every request gets tokens in order, without gaps or repeats, and exactly one last event; then the iteration
    ends. Leaving the block earlier cancels what is unfinished.
    """

    def __init__(self, cancel: Cancel, requests: Sequence[Request]) -> None:
        self._cancel = cancel
        self._received: dict[str, list[int]] = {r.id: [] for r in requests}
        self._unfinished = set(self._received)
        self._inbox: asyncio.Queue[TokenEvent | None] = asyncio.Queue()  # None: look again whether it has ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unfinished:
            await asyncio.shield(self._cancel(sorted(self._unfinished)))

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        while self._unfinished or not self._inbox.empty():
            event = await self._inbox.get()
            if event is None or event.request_id not in self._unfinished:
                continue
            if self._diverges(event):
                return await self._give_up(event.request_id)
            fresh = self._fresh(event)
            if fresh is not None:
                return fresh
        raise StopAsyncIteration

    async def cancel(self, request_id: str) -> None:
        """This one request needs no more tokens (a stop string matched): it gets no further event."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            self._inbox.put_nowait(None)
            await self._cancel([request_id])

    def deliver(self, event: TokenEvent) -> None:
        self._inbox.put_nowait(event)

    def _known(self, event: TokenEvent) -> list[int]:
        """What was received already of the event's tokens."""
        return self._received[event.request_id][event.index : event.index + len(event.token_ids)]

    def _diverges(self, event: TokenEvent) -> bool:
        """After a requeue the tokens come again from index 0. The same seed gives the same tokens; where it does
        not, the answer would be a mixture of two."""
        known = self._known(event)
        return list(event.token_ids[: len(known)]) != known or event.index > len(self._received[event.request_id])

    async def _give_up(self, request_id: str) -> TokenEvent:
        await self.cancel(request_id)
        text = "The generation was interrupted and could not be continued."
        return TokenEvent(request_id, EventKind.FAILED, index=len(self._received[request_id]), error=text)

    def _fresh(self, event: TokenEvent) -> TokenEvent | None:
        """The event without what was received already; None where nothing is left of it."""
        have, known = self._received[event.request_id], self._known(event)
        new = event.token_ids[len(known) :]
        have.extend(new)
        if event.is_last:
            self._unfinished.discard(event.request_id)
        elif not new:
            return None
        return TokenEvent(
            request_id=event.request_id,
            kind=event.kind,
            index=len(have) - len(new),
            token_ids=new,
            finish_reason=event.finish_reason,
            error=event.error,
            cached_tokens=event.cached_tokens,
        )
