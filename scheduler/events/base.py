"""The way back: token events from workers to the gateway that asked, one message per step per gateway.

A channel knows gateways by id and event batches; it does not know what the tokens mean. Delivery to a live
gateway is in order and complete, also across a dropped connection; to a gateway that is gone it is refused,
so that its work can be dropped.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from scheduler.request import TokenEvent


class EventChannel(Protocol):
    async def publish(self, reply_to: str, events: Sequence[TokenEvent]) -> bool:
        """Send one message; False when nobody listens as `reply_to` any more."""
        ...

    async def open(self, gateway_id: str) -> None:
        """Begin to collect messages for `gateway_id`; from now on `publish` to it succeeds."""
        ...

    def listen(self, gateway_id: str) -> AsyncIterator[list[TokenEvent]]:
        """The messages since `open`, in order, one list a message, until the channel is closed."""
        ...

    async def close(self) -> None: ...
