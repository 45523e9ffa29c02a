"""Turns on the event loop for short pieces of work, of which many may begin at once.

Two hundred requests may come at once, and a step of the engine may end a hundred answers, each of which makes room for
a new line of a batch. If all of them were handled before the loop does anything else, all streams would stand still.
"""

import asyncio
from weakref import WeakValueDictionary


class LoopTurns:
    """Keeps pieces of work apart: the loop does whatever else is due between two of them.

    Clients take turns, however many pieces of work each has.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._turn_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client

    async def take(self, client: str) -> None:
        """Wait for a turn of `client`, which lasts until the caller waits for something else."""
        turn_of_client = self._turn_of.setdefault(client, asyncio.Lock())
        await turn_of_client.acquire()
        try:
            await self._turn.acquire()
        except BaseException:
            turn_of_client.release()
            raise
        asyncio.get_running_loop().call_soon(self._end, turn_of_client)

    def _end(self, turn_of_client: asyncio.Lock) -> None:
        self._turn.release()
        turn_of_client.release()
