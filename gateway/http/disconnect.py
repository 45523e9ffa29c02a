"""A client that hangs up ends the work done for it.

Knows ASGI's `http.disconnect` message and asyncio's cancellation; not what the work is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

CLIENT_CLOSED = 499  # the status that nginx gives to a request whose client hung up


class ClientDisconnected(Exception):
    """The client has closed the connection before its answer was complete."""


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Run the block while the client stays connected; raises `ClientDisconnected` in it at once when not.

    `asyncio.timeout` does the cancelling, with the disconnect in the place of a deadline: it knows how to tell
    its own cancellation from everybody else's. The request's body must have been read before. Entering does
    not suspend, so that whatever the block opens first is opened for certain, and can be closed.
    """
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.reschedule(loop.time())

    scope = asyncio.timeout(None)
    try:
        async with scope:
            watcher = loop.create_task(watch())
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if scope.expired():
            raise ClientDisconnected from None
        raise
