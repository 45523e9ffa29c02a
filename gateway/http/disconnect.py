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
    """Run the block while the client is connected.

    If the client hangs up, the block is cancelled and `ClientDisconnected` is raised. The request's body must have been
    read before. The block runs in an `asyncio.timeout` without a deadline, and a disconnect sets the deadline to now.
    `asyncio.timeout` is used because it can distinguish its own cancellation of the block from other cancellations.

    Entering this context does not suspend, so a disconnect cannot cancel the block before its first statement. A block
    that begins with `async with resource` therefore always closes the resource.
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
