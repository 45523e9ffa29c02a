"""Events that wait for their delivery, in Redis, so that any gateway can deliver them and none is lost.

A gateway claims an event for a while. If it dies meanwhile, another one delivers the event again, with the same id.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
from redis.asyncio import Redis

from gateway.jobs.webhooks.event import GIVE_UP_S, Event
from gateway.store_keys import GatewayKeys
from scheduler.store.durability import durable
from scheduler.store.scripts import load_script

LEASE_S = 60.0  # seconds for which a claimed event belongs to its gateway; longer than one attempt takes
TTL_S = int(GIVE_UP_S) + 86_400  # seconds; a record that nobody removes goes by itself


class EventStore:
    """The store of undelivered events. It owns the keys `tidegate:webhook*` in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._keys = GatewayKeys.of(redis)
        self._add = load_script(redis, "gateway.jobs.webhooks", "add")
        self._claim = load_script(redis, "gateway.jobs.webhooks", "claim")

    async def add(self, event: Event, now_ms: int) -> None:
        """Store an event, durably. An event that waits already is not changed."""
        args: list[str | bytes | int] = [event.id, event.owner or "", msgspec.json.encode(event), now_ms, TTL_S]
        await self._add(keys=[self._keys.webhook + event.id, self._due(event), self._keys.webhook_owners], args=args)
        await durable(self._redis)

    async def claim(
        self, now_ms: int, limit: int, limit_of_owner: int, in_delivery: Mapping[str | None, int]
    ) -> list[Event]:
        """Take up to `limit` events that are due. Each is removed or postponed later, or is due again by itself.

        `in_delivery` is the number of events of each owner that the caller delivers at the moment. With them, it gets
        up to `limit_of_owner` of each.
        """
        args: list[str | int] = [now_ms, now_ms + int(LEASE_S * 1000), limit, limit_of_owner]
        args += [self._keys.webhook, self._keys.webhooks_due]
        for owner, number in in_delivery.items():
            args += [owner or "", number]
        claimed = await self._claim(keys=[self._keys.webhook_owners], args=args)
        return [msgspec.json.decode(event, type=Event) for event in claimed]

    async def postpone(self, event: Event, at_s: float) -> None:
        """Count a failed attempt. The next one is at `at_s`, in Unix seconds."""
        counted = msgspec.json.encode(replace(event, attempts=event.attempts + 1))
        pipeline = self._redis.pipeline()
        pipeline.set(self._keys.webhook + event.id, counted, xx=True, ex=TTL_S)
        pipeline.zadd(self._due(event), {event.id: int(at_s * 1000)}, xx=True)
        await pipeline.execute()

    async def remove(self, event: Event) -> None:
        pipeline = self._redis.pipeline()
        pipeline.delete(self._keys.webhook + event.id)
        pipeline.zrem(self._due(event), event.id)
        await pipeline.execute()

    def _due(self, event: Event) -> str:
        return self._keys.webhooks_due + (event.owner or "")
