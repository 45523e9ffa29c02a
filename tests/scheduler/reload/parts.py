"""Processes that share their tiers through the store."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from redis.asyncio import Redis

from scheduler.clock import SystemClock
from scheduler.config import TierSet, parse_tiers
from scheduler.reload.coordinator import TierChanges
from scheduler.reload.follower import TierFollower
from scheduler.reload.store import TierStore


def document(**limits: int) -> dict[str, Any]:
    """Return a tiers document with these queue limits."""
    tiers = {name: {"priority": i, "queue_limit": limit} for i, (name, limit) in enumerate(limits.items())}
    return {"default_tier": next(iter(limits)), "batch_tier": next(iter(limits)), "tiers": tiers}


class Recorder:
    """A consumer that records its tiers. `objects` is its objection to all other tiers."""

    def __init__(self, tiers: TierSet) -> None:
        self.tiers = tiers
        self.times = 0
        self.objects = ""
        self.asked = 0

    def objection(self, tiers: TierSet) -> str:
        self.asked += 1
        return self.objects

    def reconfigure(self, tiers: TierSet) -> None:
        self.tiers = tiers
        self.times += 1


class Part:
    """The objects of one process."""

    def __init__(self, redis: Redis, name: str, path: Path, depths: Mapping[str, int]) -> None:
        tiers = parse_tiers(yaml.safe_load(path.read_text()))
        self.consumer = Recorder(tiers)
        self.store = TierStore(redis)
        self.follower = TierFollower(self.store, self.consumer, name, tiers, path, SystemClock())
        self.changes = TierChanges(self.store, self.follower, self._depths, path, SystemClock())
        self.waiting = depths

    async def _depths(self, tiers: Sequence[str]) -> Mapping[str, int]:
        return {tier: self.waiting.get(tier, 0) for tier in tiers}

    @property
    def limits(self) -> dict[str, int]:
        return {name: tier.queue_limit for name, tier in self.consumer.tiers.tiers.items()}

    @property
    def generation(self) -> int:
        return self.follower.in_force.generation


Start = Callable[..., Awaitable[Part]]


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path
