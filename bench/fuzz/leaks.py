"""What a server holds while nothing is asked of it, before and after: descriptors, threads, keys, KV blocks, requests.

Knows processes, the store and the metrics' names; does not know what was asked in between.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from loadtest.client.http import Target, get

IDLE_TIMEOUT_S = 30.0  # seconds for requests whose clients have gone, and for batches, to end
SPARE = 16  # descriptors and threads that a process may open once and keep: pools of connections and of threads
# Metrics that are 0 without requests: waiting and running requests, KV blocks in use.
BUSY = ("tidegate_num_requests_waiting", "tidegate_num_requests_running", "tidegate_kv_cache_usage_ratio")


@dataclass(frozen=True, slots=True)
class Held:
    """What a server holds. The names of processes are their commands' last words, and the names of keys their kinds."""

    descriptors: dict[str, int]
    threads: dict[str, int]
    lasting_keys: dict[str, int]  # keys that have no lifetime

    def growth(self, before: "Held") -> list[str]:
        """Return a sentence for everything that has grown since `before` by more than it may."""
        found = []
        for what, now, then in (
            ("descriptors", self.descriptors, before.descriptors),
            ("threads", self.threads, before.threads),
        ):
            grown = {name: (then.get(name, 0), count) for name, count in now.items()}
            found += [f"{what} of {name}: {a} → {b}" for name, (a, b) in grown.items() if b > a + SPARE]
        new = (kind for kind, n in self.lasting_keys.items() if n > before.lasting_keys.get(kind, 0))
        return found + [f"keys without a lifetime: {kind}" for kind in new if kind not in RECORDS]


# Kinds of keys that stay until something deletes them: records of files and batches, and the indexes of what is there.
RECORDS = frozenset(("file", "files", "batch", "batches", "responses"))


async def held_by(pid: int, store_url: str) -> Held:
    parts = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    named = {f"{part.name()} {' '.join(part.cmdline()[3:4])}".strip(): part for part in parts}
    return Held(
        {name: part.num_fds() for name, part in named.items()},
        {name: part.num_threads() for name, part in named.items()},
        await _lasting_keys(store_url),
    )


async def until_idle(target: Target) -> list[str]:
    """Wait until no request is open and no KV block in use. Return what is still there after `IDLE_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            while await _busy(target):
                await asyncio.sleep(0.5)
        return []
    except TimeoutError:
        return await _busy(target)


async def _busy(target: Target) -> list[str]:
    families = text_string_to_metric_families((await get(target, "/metrics", timeout_s=10.0)).decode())
    samples = [sample for family in families for sample in family.samples if sample.name in BUSY]
    return [f"{sample.name}{sample.labels} is {sample.value}" for sample in samples if sample.value]


async def _lasting_keys(store_url: str) -> dict[str, int]:
    kinds: dict[str, int] = {}
    async with _connected(store_url) as redis:
        async for key in redis.scan_iter(count=1000):
            if await redis.ttl(key) == -1:
                kind = key.decode(errors="replace").split(":")[1]
                kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


@asynccontextmanager
async def _connected(store_url: str) -> AsyncIterator[Redis]:
    redis: Redis = Redis.from_url(store_url)
    try:
        yield redis
    finally:
        await redis.aclose()
