"""`python -m bench store`: the requests per second that a real store moves through the queue (put, claim, acknowledge).

The store has one thread, so its CPU seconds per request give the rate at which it saturates. This rate does not depend
on the CPU time of clients on the same machine. The rate that one client process reaches is also reported. Knows the
queue's protocol.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, Field
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.interface import SamplingParams
from loadtest.reporting.record import Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import one_sentence
from scheduler.clock import SystemClock
from scheduler.queue.redis import RedisQueue
from scheduler.request import Claimed, Lease, Request
from scheduler.store import connection
from tidegate.valkey import ValkeyError, running_valkey

TIER = "store-bench"
LEASE_S = 60.0  # seconds; longer than a measurement, so that no lease expires
IN_FLIGHT = 8  # concurrent commands of the client


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StorePhase:
    """The measurement of one operation (put, claim or ack) over all requests.

    `server_s` is the CPU time of the store in seconds.
    """

    name: str
    requests: int
    elapsed_s: float
    server_s: float

    @property
    def per_s(self) -> float:
        return self.requests / self.elapsed_s

    @property
    def server_us(self) -> float:
        """CPU time of the store for one request, in microseconds."""
        return 1e6 * self.server_s / self.requests


@dataclass(frozen=True, slots=True)
class StoreRate:
    batch: int
    prompt_tokens: int
    phases: Sequence[StorePhase]

    @property
    def server_us(self) -> float:
        """CPU time of the store for put, claim and ack of one request, in microseconds."""
        return sum(phase.server_us for phase in self.phases)

    @property
    def full_at_per_s(self) -> float:
        """The rate at which the store saturates: requests per second that keep its one thread always busy."""
        return 1e6 / self.server_us


class Store(BaseModel):
    """Requests per second that a real store can put, claim and ack, compared with the rate that is needed."""

    redis_url: str = Field("", description="redis://… or unix://… of a store to measure; empty: one is started.")
    requests: int = Field(20_000, ge=64, le=1_000_000, description="Number of requests in a round.")
    batches: str = Field(
        "1,64",
        pattern=r"^[1-9]\d*(,[1-9]\d*)*$",
        description="Numbers of requests in one call; each number gets a round.",
    )
    prompt_tokens: int = Field(128, ge=1, le=100_000, description="Prompt tokens of each request.")
    needed: float = Field(10_000, gt=0, description="Requests a second to compare the result with.")

    def cli_cmd(self) -> None:
        # redis-py raises ValueError for a URL that it cannot read.
        with one_sentence(RedisError, ValkeyError, OSError, ValueError, said_by="store"), self._store() as url:
            rates = asyncio.run(self._measure(url))
        publish(store_record(rates, self.needed))

    @contextmanager
    def _store(self) -> Iterator[str]:
        """Yield the URL of the given store, or of a store that is started and removed at the end of the block."""
        if self.redis_url:
            yield self.redis_url
            return
        with tempfile.TemporaryDirectory() as data_dir, running_valkey(Path(data_dir)) as url:
            yield url

    async def _measure(self, url: str) -> list[StoreRate]:
        sizes = [int(part) for part in self.batches.split(",")]
        return [await measure_store(url, self.requests, size, self.prompt_tokens) for size in sizes]


async def measure_store(url: str, requests: int, batch: int, prompt_tokens: int) -> StoreRate:
    """Return the rates at which `requests` are put, claimed and acknowledged in batches of `batch`.

    Leaves nothing in the store.
    """
    async with connection.connect(url) as client:
        await client.ping()  # if the store does not answer, fail before anything must be cleaned up
        queue = RedisQueue(client, SystemClock(), "store-bench")
        batches = _batches(requests, batch, prompt_tokens)
        claimed: list[list[Claimed]] = []

        async def put(group: Sequence[Request]) -> None:
            await queue.put(group)

        async def claim(group: Sequence[Request]) -> None:
            claimed.append(await queue.claim({TIER: len(group)}, LEASE_S))

        async def ack(group: Sequence[Claimed]) -> None:
            await queue.ack([Lease(c.request.id, c.fence) for c in group])

        try:
            phases = [await _phase(client, "put", put, batches), await _phase(client, "claim", claim, batches)]
            phases.append(await _phase(client, "ack", ack, claimed))
        finally:
            await queue.cancel([request.id for group in batches for request in group])
            await queue.close()
    return StoreRate(batch, prompt_tokens, phases)


def store_record(rates: Sequence[StoreRate], needed_per_s: float) -> Record:
    header = ("requests a call", "move", "requests/s", "store, us each")
    rows = [
        (str(rate.batch), phase.name, f"{phase.per_s:.0f}", f"{phase.server_us:.1f}")
        for rate in rates
        for phase in rate.phases
    ]
    notes = []
    for rate in rates:
        share = needed_per_s / rate.full_at_per_s
        notes.append(
            f"{rate.batch} a call: a request costs the store {rate.server_us:.1f} us from put to ack; it is full at "
            f"{rate.full_at_per_s:.0f} requests/s, and {needed_per_s:.0f} keep it busy {100 * share:.0f} % of the time"
        )
    return Record(sections=[Section(table=Table.of(header, rows), notes=tuple(notes))])


async def _phase(
    client: Redis, name: str, move: Callable[[Sequence[T]], Awaitable[None]], groups: Sequence[Sequence[T]]
) -> StorePhase:
    waiting = iter(list(groups))

    async def work() -> None:
        for group in waiting:
            await move(group)

    before_s, started_s = await _server_s(client), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    elapsed_s = time.perf_counter() - started_s
    return StorePhase(name, sum(map(len, groups)), elapsed_s, await _server_s(client) - before_s)


async def _server_s(client: Redis) -> float:
    """Return the CPU seconds of the store since its start, in user and system mode."""
    info = await client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _batches(requests: int, batch: int, prompt_tokens: int) -> list[list[Request]]:
    prompt, sampling = tuple(range(prompt_tokens)), SamplingParams(max_tokens=1)
    now_ms = SystemClock().wall_ms()
    made = [
        Request(f"store-bench-{batch}-{i}", TIER, prompt, sampling, now_ms, now_ms + 60_000, "store-bench")
        for i in range(requests)
    ]
    return [made[i : i + batch] for i in range(0, requests, batch)]
