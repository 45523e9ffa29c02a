"""Look up the addresses of host names, in threads of their own, because a name server may be slow.

Nobody can stop a lookup, and anybody may name a host whose name server never answers. So lookups have turns: a few of
each API key and some in all. Knows names and addresses; does not know webhooks.
"""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gateway.fairness import Turns
from gateway.http.access.hosts import address_of
from gateway.keys.webhooks import Address

MAX_LOOKUPS, MAX_LOOKUPS_OF_OWNER = 16, 4
TURN_S = 15.0  # seconds for which a lookup waits for its turn

Resolve = Callable[[str, int], list[Address]]


class LookupsBusy(Exception):
    """There was no turn for a lookup in time. That says nothing about the host."""


def addresses_of(host: str, port: int) -> list[Address]:
    """Return the addresses of a host name, in the order of the system's preference. Blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = (address_of(str(entry[4][0]).partition("%")[0]) for entry in found)
    return list(dict.fromkeys(address for address in addresses if address is not None))


class Lookups:
    """The lookups of one gateway."""

    def __init__(self, resolve: Resolve = addresses_of, turn_s: float = TURN_S) -> None:
        self._resolve = resolve
        self._turn_s = turn_s
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "webhook-lookup")
        self._turns = Turns(MAX_LOOKUPS, MAX_LOOKUPS_OF_OWNER)

    async def begin(self, host: str, port: int, owner: str | None) -> "asyncio.Future[list[Address]]":
        """Begin to look up `host` for `owner` when it is its turn. Return a future of its addresses.

        Raises `LookupsBusy` if there is no turn in time. Whoever awaits the future must shield it: the lookup has its
        turn until its thread has ended.
        """
        loop = asyncio.get_running_loop()
        if (literal := address_of(host)) is not None:
            known: asyncio.Future[list[Address]] = loop.create_future()
            known.set_result([literal])
            return known
        try:
            async with asyncio.timeout(self._turn_s):
                end = await self._turns.begin(owner)
        except TimeoutError:
            raise LookupsBusy from None

        def on_end(future: "asyncio.Future[list[Address]]") -> None:
            end()
            if not future.cancelled():
                future.exception()  # retrieved also if nobody waits any more

        future = loop.run_in_executor(self._threads, self._resolve, host, port)
        future.add_done_callback(on_end)
        return future
