"""Turns on the event loop for short pieces of work, of which many may begin at once.

A step of the engine may end a hundred answers, and each of them makes place for a new line of a batch. If all of them
were written, and all lines encoded, before the loop does anything else, the streams of others would stand still.
"""

import asyncio


class LoopTurns:
    """Keeps two pieces of work apart: the loop runs everything else that is due between them."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for a turn. It lasts until the caller awaits something else; the turns are in the order of the calls."""
        async with self._turn:
            await asyncio.sleep(0)
