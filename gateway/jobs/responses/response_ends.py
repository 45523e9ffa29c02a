"""Tells of the ends of background responses, also of those whose gateway has died.

Responses of whose end somebody wants to hear are in a list of the store until their end is told. The gateway that
generates a response tells of it at once. What is left when its lease has ended is told by any gateway. Knows leases and
statuses; does not know who is told, or how.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import structlog
from redis.asyncio import Redis

from gateway.files.pagination import text
from gateway.jobs.responses.store import StoredResponse
from gateway.store_keys import GatewayKeys
from scheduler.clock import Clock
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)

SWEEP_S = 5.0  # seconds between two looks for ends that nobody has told

Find = Callable[[str, str | None], Awaitable[StoredResponse | None]]


class Announcer(Protocol):
    """Tells an owner that an object has ended, as `gateway.jobs.webhooks.service.WebhookService` does."""

    def is_wanted(self, metadata: Mapping[str, str] | None, owner: str | None) -> bool: ...

    async def announce(
        self, kind: str, object_id: str, metadata: Mapping[str, str] | None, owner: str | None
    ) -> None: ...


class ResponseEnds:
    """The ends of all background responses of a store."""

    def __init__(self, redis: Redis, announcer: Announcer, clock: Clock) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._announcer = announcer
        self._clock = clock

    async def expect(self, response: dict[str, Any], owner: str | None) -> None:
        """Tell of the end of a response that was stored as queued, if somebody wants to hear of it."""
        if self._announcer.is_wanted(response.get("metadata"), owner):
            await self._redis.hset(self._keys.responses_untold, response["id"], owner or "")

    async def tell(self, response: dict[str, Any], owner: str | None) -> None:
        """Tell that a response has ended. If the store does not answer, `watch` does it later."""
        try:
            if await self._redis.hexists(self._keys.responses_untold, response["id"]):
                kind, metadata = f"response.{response['status']}", response.get("metadata")
                await self._announcer.announce(kind, response["id"], metadata, owner)
                await self._redis.hdel(self._keys.responses_untold, response["id"])
        except STORE_AWAY as error:
            log.warning("the end of a response is told later", response_id=response["id"], error=str(error))

    async def watch(self, find: Find, is_left: Callable[[StoredResponse], bool]) -> None:
        """Tell of the ends that nobody has told, for ever.

        `is_left` says whether no gateway looks after a response any more. `find` returns a response by its id and
        owner, and as failed if its gateway has died before its end.
        """
        while True:
            try:
                for response_id, owner in (await self._redis.hgetall(self._keys.responses_untold)).items():
                    await self._tell_if_left(text(response_id), text(owner) or None, find, is_left)
            except STORE_AWAY as error:
                log.warning("ends of responses wait for the store", error=str(error))
            await self._clock.sleep(SWEEP_S)

    async def _tell_if_left(
        self, response_id: str, owner: str | None, find: Find, is_left: Callable[[StoredResponse], bool]
    ) -> None:
        found = await find(response_id, owner)
        if found is None:  # it was deleted, or has expired
            await self._redis.hdel(self._keys.responses_untold, response_id)
        elif not found.is_running and is_left(found):
            await self.tell(found.response, owner)
