"""Cancel the work for a request when its client hangs up.

Knows ASGI's `http.disconnect` message and asyncio's cancellation; does not know what the work is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

CLIENT_CLOSED = 499  # nginx's status for a request whose client hung up; it is logged and counted, never sent


class ClientDisconnected(Exception):
    """The client closed the connection before its answer was complete."""


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Run the block while the client is connected. Cancels it and raises `ClientDisconnected` when the client hangs up.

    `asyncio.timeout` does the cancelling, because it tells its own cancellation from others: a disconnect sets its
    deadline to now. The request's body must have been read before. Entering does not suspend, so the first thing that
    the block opens is always opened, and can be closed.
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
