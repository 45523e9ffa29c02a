"""Lets the parts of a worker outlast a store that is away: they go on, and try again in their next round.

While the store is away, or refuses writes, no worker and no gateway can send heartbeats. A worker must therefore not
regard another process as silent then.
"""

from collections.abc import Awaitable

import structlog

from scheduler.store.errors import StoreRefused

log = structlog.get_logger()


class StoreOutage:
    """What one worker knows of its store. `lasts` holds from an error to the next heartbeat."""

    def __init__(self, *errors: type[Exception]) -> None:
        """`errors` are those that the worker outlasts; without any, only refused writes."""
        self._errors = errors or (StoreRefused,)
        self.lasts = False

    async def attempt(self, work: Awaitable[object]) -> bool:
        """Await `work`. Return False if the store was away."""
        try:
            await work
        except self._errors as error:
            if not self.lasts:
                log.warning("the store is away; the worker keeps its work and tries again", reason=str(error))
            self.lasts = True
            return False
        return True

    def end(self) -> None:
        """Note that the store has taken a heartbeat."""
        if self.lasts:
            log.info("the store is back")
        self.lasts = False
