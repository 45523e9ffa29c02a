"""The store of a test session: one server, a cluster of three, or a pair behind a Sentinel.

TIDEGATE_TEST_STORE says which: `server` (the default), `cluster` or `sentinel`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis as sync_redis

from scheduler.store import address
from scheduler.store.keys import Keys
from tests.scheduler.store.nodes import running_sentinel, server_cluster, server_pair
from tidegate.valkey import running_valkey


@dataclass(frozen=True, slots=True)
class Store:
    url: str  # for `connection.connect`
    server: str  # the URL of the one server that has the data, for other clients

    @property
    def keys(self) -> Keys:
        _, route = address.parse(self.url)
        return Keys(route.namespace)

    def stored(self) -> list[str]:
        """Return all keys."""
        with sync_redis.Redis.from_url(self.server) as client:
            return [key.decode() for key in client.keys("*")]

    def empty(self) -> None:
        with sync_redis.Redis.from_url(self.server) as client:
            client.flushall()


@contextmanager
def running_store(kind: str, folder: Path) -> Iterator[Store]:
    match kind:
        case "server":
            with running_valkey(folder) as url:
                yield Store(url, url)
        case "cluster":
            with server_cluster(folder) as cluster:
                asyncio.run(cluster.start())
                yield Store(cluster.url, cluster.primary_of("{tidegate}:").valkey.url)
        case "sentinel":
            with server_pair(folder) as pair, asyncio.Runner() as runner:
                runner.run(pair.start())
                running = running_sentinel(folder, pair, down_ms=60_000)
                sentinel = runner.run(running.__aenter__())
                try:
                    yield Store(sentinel.url, pair.primary.valkey.url)
                finally:
                    runner.run(running.__aexit__(None, None, None))
        case _:
            raise ValueError(f"TIDEGATE_TEST_STORE={kind}: it is server, cluster or sentinel")
