"""Finds the primary of a store: Sentinels, or the nodes of a cluster, are asked who it is.

Knows the questions and how often they are asked; does not know connections of clients. A deployment's keys have one
hash tag in a cluster, so they all have one slot, and one primary.
"""

import asyncio
import builtins
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import structlog
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from scheduler.store.keys import Namespace

log = structlog.get_logger()

Address = tuple[str, int]  # host and port

NODE_S = 1.0  # a Sentinel or node that takes longer to connect and to answer is passed over
WATCH_S = 1.0  # between two questions


class Guide(Protocol):
    """A server that may know the primary."""

    async def ask(self) -> Address:
        """Return the address of the primary. Raises `redis.exceptions.ConnectionError` if it does not know it."""

    def others(self, known: "dict[Address, Guide]") -> "dict[Address, Guide]":
        """Return the guides that the last answer named: those of `known`, and new ones."""

    async def aclose(self) -> None:
        """Close the connection. The next question opens it again."""


class SentinelGuide:
    def __init__(self, place: Address, service: str, settings: dict[str, Any]) -> None:
        self.sentinel = Sentinel([place], sentinel_kwargs=_unbounded(settings))  # type: ignore[no-untyped-call]
        self.service = service

    async def ask(self) -> Address:
        host, port = await self.sentinel.discover_master(self.service)
        return host, int(port)

    def others(self, known: dict[Address, Guide]) -> dict[Address, Guide]:
        return {}

    async def aclose(self) -> None:
        await self.sentinel.aclose()


class ClusterGuide:
    """A node of a cluster, which knows the primary of each slot."""

    def __init__(self, place: Address, namespace: str, settings: dict[str, Any]) -> None:
        self.host, port = place
        self._namespace, self._settings = namespace, settings
        self._nodes: list[Address] = []  # primaries and replicas, as it said last
        kind: type[AbstractConnection] = settings.get("connection_class", Connection)
        options = _unbounded({**settings, "connection_class": kind, "host": self.host, "port": port})
        self.pool = BlockingConnectionPool(**options)
        self._slot = key_slot(namespace.encode())

    async def ask(self) -> Address:
        pipeline = Redis(connection_pool=self.pool).pipeline(transaction=False)
        pipeline.execute_command("CLUSTER INFO")
        pipeline.execute_command("CLUSTER SLOTS")
        state, slots = await pipeline.execute()
        self._nodes = [self._place(node) for _, _, *nodes in slots for node in nodes]
        primary = self._primary(slots)
        # A node that is cut off from the others, and has not noticed a failover, fails after the cluster's time limit.
        if state["cluster_state"] != "ok" or primary is None:
            raise MasterNotFoundError(f"The cluster has no primary for slot {self._slot}.")
        return primary

    def others(self, known: dict[Address, Guide]) -> dict[Address, Guide]:
        return {
            place: known.get(place) or ClusterGuide(place, self._namespace, self._settings) for place in self._nodes
        }

    async def aclose(self) -> None:
        await self.pool.disconnect()

    def _primary(self, slots: Sequence[Any]) -> Address | None:
        """Return the primary in a reply to CLUSTER SLOTS."""
        found = (primary for first, last, primary, *_ in slots if first <= self._slot <= last)
        return next(map(self._place, found), None)

    def _place(self, node: Sequence[Any]) -> Address:
        """Return the address of a node of such a reply. A host that is left out is the one that was asked."""
        host, port, *_ = node
        return host.decode() if host else self.host, int(port)


def _unbounded(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without redis-py's time limits and retries: the limit is `NODE_S`, and the next guide is asked.

    redis-py's limits use `asyncio.wait_for`: `scheduler.store.connection` says why not.
    """
    return {**settings, "socket_timeout": None, "retry": Retry(NoBackoff(), 0), "protocol": 2}


class SupportsAbort(Protocol):
    def abort(self) -> None:
        """Close a connection, also under a command that waits for its reply."""


@dataclass(slots=True)
class Route:
    """The way of a client's connections to the primary."""

    namespace: str = Namespace.prefix  # in front of the keys of its store
    guides: list[Guide] = field(default_factory=list)  # the one that knew last comes first; none: the address is fixed
    connections: WeakSet[SupportsAbort] = field(default_factory=WeakSet)
    changes: int = 0  # how often it has turned out that connections lead to a wrong or dead node
    _learned: dict[Address, Guide] = field(default_factory=dict)  # nodes that the last answer named; the URL may not
    _primary: Address | None = None
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def watch(self) -> None:
        """Notice a new primary, for ever: Sentinels may take ten seconds until they demote the old one."""
        while True:
            await asyncio.sleep(WATCH_S)
            with contextlib.suppress(RedisError):  # all may still be right
                await self.primary()

    async def primary(self) -> Address | None:
        """Return the address of the primary, as a guide says; None without guides.

        Raises `redis.sentinel.MasterNotFoundError`, a `ConnectionError`, if no guide answers or knows it.
        """
        if not self.guides:
            return None
        async with self._asking:
            address = await self._ask()
            if self._primary not in (None, address):
                self.changes += 1
                log.warning("the store has a new primary", primary=f"{address[0]}:{address[1]}")
                for connection in list(self.connections):
                    connection.abort()
            self._primary = address
        return address

    async def _ask(self) -> Address:
        why = ""  # of the last guide that did not answer
        for guide in (*self.guides, *self._learned.values()):
            try:
                async with asyncio.timeout(NODE_S):
                    address = await guide.ask()
            except (ConnectionError, TimeoutError, builtins.TimeoutError) as error:
                why = f" {str(error) or 'no answer in time'}"
                continue
            finally:
                # It opens its connection again for the next question. A cancellation must not leave it open.
                await asyncio.shield(guide.aclose())
            if guide in self.guides:
                self.guides.remove(guide)
                self.guides.insert(0, guide)
            self._learned = guide.others(self._learned)
            return address
        asked = "No Sentinel that the URL names, or no known node of the cluster, knows the primary."
        raise MasterNotFoundError(f"{asked}{why}")
