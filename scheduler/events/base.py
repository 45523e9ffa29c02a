"""Event channels: they carry token events from workers back to the gateway of each request.

A worker sends one message per step and gateway. A channel knows gateway ids and lists of events; it does not know what
the tokens mean. A live gateway gets all messages in order, also across a dropped connection; after a failover of the
store, the newest may come again. Publishing to a gateway that is gone fails, so that workers can drop its requests.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from scheduler.request import TokenEvent


class EventChannel(Protocol):
    async def publish(self, messages: Mapping[str, Sequence[TokenEvent]]) -> list[str]:
        """Send one message to each of these gateways. Return those that do not listen any more."""
        ...

    async def open(self, gateway_id: str) -> None:
        """Start to collect messages for `gateway_id`. From now on, `publish` to this gateway succeeds."""
        ...

    def listen(self, gateway_id: str) -> AsyncIterator[list[TokenEvent]]:
        """Yield the messages sent since `open`, in order, until the channel is closed.

        Each message is a list of events.
        """
        ...

    async def beats(self, gateway_ids: Sequence[str]) -> list[int | None]:
        """Return the newest heartbeat of each gateway: a number that changes every second while the gateway listens.

        None if the gateway is gone.
        """
        ...

    async def close(self) -> None: ...
