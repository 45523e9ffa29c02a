"""How a gateway ends: it goes on listening while it drains, so that clients get 503, not a refused connection.

Knows the server, its connections and the gateway; does not know requests.
"""

import asyncio
import math

import uvicorn

from gateway.state import Gateway

# Seconds for which the gateway listens at least after a stop signal, if any client is connected. Load balancers check
# every few seconds whether a server is ready; until they have noticed the drain, they go on sending requests here.
LISTEN_S = 5.0
LAST_WORDS_S = 1.0  # seconds for the errors of unfinished requests to reach their clients
CHECK_S = 0.05  # seconds between two checks whether the drain is over
SHUTTING_DOWN = "The server is shutting down. Try again in 5 s."


class Drain:
    """The handler of a gateway's stop signals.

    The first signal starts the drain: new requests get 503, and open requests may finish within `drain_s` seconds. The
    drain ends when they have finished, but not before `LISTEN_S`, unless no client is connected and none has asked for
    anything since the signal: who was refused may try again. Requests that are left at the end get an error. A second
    signal ends the drain at once.
    """

    def __init__(self, server: uvicorn.Server, gateway: Gateway, drain_s: float) -> None:
        self._server = server
        self._gateway = gateway
        self._max_s = max(0.0, drain_s - LAST_WORDS_S)
        self._draining: asyncio.Task[None] | None = None
        self._num_expected = 0  # requests that will have been answered if none comes any more
        server.config.timeout_graceful_shutdown = math.ceil(LAST_WORDS_S)

    def __call__(self) -> None:
        if self._draining is not None:
            self._end()
            return
        state = self._server.server_state
        self._num_expected = state.total_requests + len(state.tasks)
        self._gateway.drain()
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while not self._is_over(loop.time() - began_s):
            await asyncio.sleep(CHECK_S)
        self._end()

    def _is_over(self, seconds: float) -> bool:
        """Return whether the drain, which began `seconds` ago, is over."""
        state = self._server.server_state
        has_clients = bool(state.connections) or state.total_requests > self._num_expected
        has_finished = not has_clients or (seconds >= LISTEN_S and not state.tasks)
        return has_finished or seconds >= self._max_s

    def _end(self) -> None:
        """Let the server close its port, and the connections when their last bytes are sent."""
        self._gateway.fail_open(SHUTTING_DOWN)
        self._server.should_exit = True
