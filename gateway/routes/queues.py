"""One reading of the queues in the store, and how long it took: for /metrics and GET /admin/overview."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.queue.base import Backlog


@dataclass(frozen=True, slots=True)
class Queues:
    backlogs: Mapping[str, Backlog]  # by tier
    ages_s: Mapping[str, float]  # how long the request at the head of each tier's queue has waited
    latency_s: float  # of one round trip to the store


async def read_queues(client: SchedulerClient, clock: Clock) -> Queues:
    """Read the queues of all tiers. Raises the errors of the store."""
    began_s = clock.now()
    backlogs = await client.backlogs()
    latency_s = clock.now() - began_s
    return Queues(backlogs, await client.queue_ages_s(), latency_s)
