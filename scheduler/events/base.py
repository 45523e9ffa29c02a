"""Event channels: token events travel from workers back to the gateway of each request.

A worker sends one message per step and gateway. A channel knows gateway ids and lists of events; it does not know what
the tokens mean. Delivery to a live gateway is in order and complete, also across a dropped connection. Publishing to a
gateway that is gone fails, so that workers can drop its requests.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from scheduler.request import TokenEvent


class EventChannel(Protocol):
    async def publish(self, reply_to: str, events: Sequence[TokenEvent]) -> bool:
        """Send one message. Return False if no gateway `reply_to` listens any more."""
        ...

    async def open(self, gateway_id: str) -> None:
        """Start to collect messages for `gateway_id`. From now on `publish` to it succeeds."""
        ...

    def listen(self, gateway_id: str) -> AsyncIterator[list[TokenEvent]]:
        """Yield the messages since `open` in order, one list of events per message, until the channel is closed."""
        ...

    async def close(self) -> None: ...
