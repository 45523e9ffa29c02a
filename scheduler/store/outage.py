"""Lets the tasks of a worker outlast a store that refuses writes: they go on, and try again in their next round.

While the store refuses writes, no worker and no gateway can send heartbeats. A worker must therefore not take another
process for silent then.
"""

from collections.abc import Awaitable

import structlog

from scheduler.store.errors import StoreRefused

log = structlog.get_logger()


class StoreOutage:
    """What one worker knows of the store's refusals. `is_refused` holds from a refusal to the next heartbeat."""

    def __init__(self) -> None:
        self.is_refused = False

    async def attempt(self, work: Awaitable[object]) -> bool:
        """Await `work`. Return False if the store refused a write of it."""
        try:
            await work
        except StoreRefused as refusal:
            if not self.is_refused:
                log.warning("the store refuses writes; the worker keeps its work and tries again", cause=refusal.cause)
            self.is_refused = True
            return False
        return True

    def end(self) -> None:
        """Note that the store has taken a heartbeat."""
        if self.is_refused:
            log.info("the store takes writes again")
        self.is_refused = False
