"""What must not be left over when all requests have ended: requests, leases, keys, files, descriptors.

Knows the names of the product's keys and folders; does not know faults.
"""

import asyncio
import contextlib
from time import monotonic

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.chaos.site import GATEWAYS, STORE, WORKERS, Site
from gateway.http.exposition import WorkerPages
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.store.connection import MAX_CONNECTIONS
from scheduler.store.keys import Keys

# Seconds for parts to see each other again and to clear up. The slowest is a part that comes back from a fault of the
# last second: it loads a model.
SETTLE_S = 45.0
CHECK_S = 0.25
# Descriptors that a part may have more than when it was idle: its pool of connections to the store, and clients'.
MORE_DESCRIPTORS = 2 * MAX_CONNECTIONS
HELD = tuple(f"tidegate_num_requests_{state}" for state in ("running", "paused", "swapped"))
KEYS = Keys()
# Keys without a lifetime that an idle server has: numbers and indexes, records of batches, files and tiers, the marker.
KEPT = (
    KEYS.sequence,
    KEYS.epoch,
    KEYS.waiters,
    KEYS.workers,
    KEYS.tiers,
    KEYS.followers,
    "tidegate:batches",
    "tidegate:batch:",
    "tidegate:files",
    "tidegate:file:",
    "tidegate:responses",
    "tidegate:storage",
)


class Leftovers:
    """Compares the idle server with its state before the load. Make it when all parts are ready and idle."""

    def __init__(self, site: Site, is_calm: bool = False) -> None:
        """`is_calm`: no part may have been started again."""
        self._site = site
        self._is_calm = is_calm
        self._pids = {part: site.pid_of(part) for part in site.parts}
        self._descriptors = {part: self._num_descriptors(part) or 0 for part in site.parts}

    async def until_ready(self) -> None:
        """Wait until each gateway sees all workers."""
        async with asyncio.timeout(SETTLE_S):
            while await self._not_ready():
                await asyncio.sleep(CHECK_S)

    async def settle(self) -> dict[str, str]:
        """Wait until nothing is left, for `SETTLE_S` at most. Return what is, by the name of the check."""
        until_s = monotonic() + SETTLE_S
        while (found := await self._found()) and monotonic() < until_s:
            await asyncio.sleep(CHECK_S)
        return found

    async def _found(self) -> dict[str, str]:
        found = {
            "readiness": await self._not_ready(),
            "requests": await self._requests(),
            "keys": await self._eternal_keys(),
            "sequences": await self._sequences(),
            "directories": self._directories(),
            "descriptors": self._more_descriptors(),
            "crashes": self._crashes() if self._is_calm else "",
        }
        return {name: what for name, what in found.items() if what}

    async def _not_ready(self) -> str:
        for gateway in GATEWAYS:
            try:
                async with httpx.AsyncClient(timeout=5) as http:
                    report = (await http.get(f"{self._site.urls[gateway]}/ready")).json()
            except (httpx.HTTPError, ValueError) as error:
                return f"{gateway}: {error!r}"
            if not report["ready"] or sorted(worker["id"] for worker in report["workers"]) != sorted(WORKERS):
                return f"{gateway}: {report}"
        return ""

    async def _requests(self) -> str:
        """Return the requests that the store still knows: waiting ones, leased ones, all."""
        store = self._site.store
        waiting = [key async for key in store.scan_iter(f"{KEYS.queue}*", count=1000)]
        leased = await store.zrange(KEYS.leases, 0, -1)
        known = [key async for key in store.scan_iter(f"{KEYS.request}*", count=1000)]
        return f"waiting {waiting}, leased {leased}, known {known[:5]}" if waiting or leased or known else ""

    async def _eternal_keys(self) -> str:
        """Return the keys that never expire and that an idle server does not have."""
        names = [key.decode() async for key in self._site.store.scan_iter("*", count=1000)]
        others = [name for name in names if not name.startswith(KEPT)]
        pipeline = self._site.store.pipeline(transaction=False)
        for name in others:
            pipeline.ttl(name)
        eternal = [name for name, ttl in zip(others, await pipeline.execute(), strict=True) if ttl == -1]
        return ", ".join(eternal[:5])

    async def _sequences(self) -> str:
        """Return what the workers of this release still hold, from their metrics."""
        workers = [worker for worker in WORKERS if worker not in self._site.sources]
        pages = await WorkerPages(workers).read(await RedisWorkerRegistry(self._site.store).workers())
        held = [f"{worker} shows no metrics" for worker in workers if worker not in pages]
        for text in pages.values():
            for family in text_string_to_metric_families(text):
                if family.name in HELD:
                    held += [f"{s.name}{s.labels} {s.value:.0f}" for s in family.samples if s.value]
        return ", ".join(held)

    def _directories(self) -> str:
        """Return the working directories of batches, which go when a batch has ended."""
        batches = self._site.data_dir / "batches"
        return ", ".join(path.name for path in batches.iterdir()) if batches.exists() else ""

    def _more_descriptors(self) -> str:
        more = []
        for part, before in self._descriptors.items():
            now = self._num_descriptors(part)
            most = before + MORE_DESCRIPTORS * (len(self._site.links) if part == STORE else 1)
            if now is not None and now > most:
                more.append(f"{part}: {now}, before {before}")
        return ", ".join(more)

    def _crashes(self) -> str:
        return ", ".join(part for part, pid in self._pids.items() if self._site.pid_of(part) != pid)

    def _num_descriptors(self, part: str) -> int | None:
        import psutil

        with contextlib.suppress(psutil.Error):
            if (pid := self._site.pid_of(part)) is not None:
                return int(psutil.Process(pid).num_fds())
        return None
