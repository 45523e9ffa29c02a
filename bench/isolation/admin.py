"""The control of an experiment's servers: tiers are put in force, and an arm starts when a server has no more work.

Knows the admin routes, and the metrics that show whether a server is busy. Does not know arms or statistics.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from bench.isolation.arms import Document
from loadtest.client.http import Target, TargetError, get, post
from loadtest.client.server_metrics import read_metrics

BUSY_GAUGES = (
    "tidegate_num_requests_running",
    "tidegate_num_requests_waiting",
    "tidegate_num_requests_paused",
    "tidegate_num_requests_swapped",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)
QUIET_TIMEOUT_S = 30.0  # longest wait for a server to finish the requests of the previous arm
POLL_S = 0.1  # seconds between two readings of the metrics


@dataclass(frozen=True, slots=True)
class Systems:
    """The servers of an experiment: a Tidegate server, and optionally a peer to compare with.

    The peer is any OpenAI-compatible server.
    """

    ours: Target
    peer: Target | None = None

    @property
    def all(self) -> tuple[Target, ...]:
        return (self.ours,) if self.peer is None else (self.ours, self.peer)

    def of(self, is_peer: bool) -> Target:
        target = self.peer if is_peer else self.ours
        assert target is not None, "the peer's arms are made only where there is one"
        return target


async def put_tiers(target: Target, document: Document) -> None:
    """Put these tiers in force; return when every part of the server uses them.

    Raises `TargetError` if the server does not answer or refuses the tiers.
    """
    await post(target, "/admin/tiers", document)


async def tiers_in_force(target: Target) -> Document:
    """Return the tiers document that the server uses. Raises `TargetError` if the server does not answer."""
    answer: dict[str, Any] = msgspec.json.decode(await get(target, "/admin/tiers"))
    document: Document = answer["document"]
    return document


@asynccontextmanager
async def tiers_restored(target: Target) -> AsyncIterator[None]:
    """Restore, after the block, the tiers that were in force before it. Raises `TargetError` if that fails."""
    before = await tiers_in_force(target)
    try:
        yield
    finally:
        await put_tiers(target, before)


async def explanations(target: Target) -> dict[str, Any] | None:
    """Return the answer of `GET /admin/sla`; None if the server has no such route."""
    try:
        told: dict[str, Any] = msgspec.json.decode(await get(target, "/admin/sla"))
    except (TargetError, msgspec.DecodeError):
        return None
    return told


async def wait_until_quiet(target: Target, settle_s: float) -> bool:
    """Wait until the metrics show that no request waits or runs, then wait another `settle_s` seconds.

    Return False if the server is still busy after `QUIET_TIMEOUT_S`, or if it has no metrics.
    """
    until_s = perf_counter() + QUIET_TIMEOUT_S
    is_quiet = False
    while not is_quiet and perf_counter() < until_s:
        try:
            reading = await read_metrics(target)
        except TargetError:
            break  # without metrics, the wait of `settle_s` must be enough
        is_quiet = not sum(reading.total(gauge) or 0.0 for gauge in BUSY_GAUGES)
        if not is_quiet:
            await asyncio.sleep(POLL_S)
    await asyncio.sleep(settle_s)
    return is_quiet
