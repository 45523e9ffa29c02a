"""An event channel within one process, for the simulator and for tests of code that uses an event channel."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from scheduler.request import TokenEvent


class MemoryEventChannel:
    """An event channel in memory. Implements `scheduler.events.base.EventChannel`.

    Publishers and listeners must share one object.
    """

    def __init__(self) -> None:
        self._num_reads = 0
        self._inboxes: dict[str, asyncio.Queue[list[TokenEvent] | None]] = {}

    async def publish(self, messages: Mapping[str, Sequence[TokenEvent]]) -> list[str]:
        for reply_to, events in messages.items():
            if (inbox := self._inboxes.get(reply_to)) is not None:
                inbox.put_nowait(list(events))
        return [reply_to for reply_to in messages if reply_to not in self._inboxes]

    async def open(self, gateway_id: str) -> None:
        self._inboxes[gateway_id] = asyncio.Queue()

    async def listen(self, gateway_id: str) -> AsyncIterator[list[TokenEvent]]:
        inbox = self._inboxes.get(gateway_id)
        if inbox is None:
            raise RuntimeError(f"listen before open: {gateway_id}")
        while (message := await inbox.get()) is not None:
            yield message

    async def beats(self, gateway_ids: Sequence[str]) -> list[int | None]:
        """Return a new number for each gateway that listens: within one process, no listener hangs."""
        self._num_reads += 1
        return [self._num_reads if gateway_id in self._inboxes else None for gateway_id in gateway_ids]

    async def close(self) -> None:
        for inbox in self._inboxes.values():
            inbox.put_nowait(None)
        self._inboxes.clear()
