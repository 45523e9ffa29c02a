"""The events of one generation, taken in handfuls.

Knows generations and time limits; does not look into events. A pump takes events off the generation as they
come, so that whoever writes to a slow client finds all that came meanwhile and sends it as one chunk.
"""

import asyncio
from types import TracebackType
from typing import Self

from scheduler.client.token_stream import Generation
from scheduler.request import TokenEvent


class EventFeed:
    """Use as `async with EventFeed(generation) as feed: … await feed.take(timeout_s)`. Leaving the block early
    cancels what is unfinished, as leaving the generation does."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._events: list[TokenEvent] = []
        self._ready = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._generation.__aenter__()
        self._pump = asyncio.create_task(self._fill())
        self._pump.add_done_callback(lambda _: self._ready.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pump is not None:
            self._pump.cancel()
        await self._generation.__aexit__(kind, error, trace)

    async def take(self, timeout_s: float | None) -> list[TokenEvent]:
        """All events that wait; at least one, or none after `timeout_s`. Raises what broke the generation."""
        assert self._pump is not None, "take() belongs into the `async with` block"
        if not self._events and not self._pump.done():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
            except TimeoutError:
                return []
        if not self._events:
            self._pump.result()
            raise EOFError("the generation has ended")
        self._ready.clear()
        events, self._events = self._events, []
        return events

    async def _fill(self) -> None:
        async for event in self._generation:
            self._events.append(event)
            self._ready.set()
