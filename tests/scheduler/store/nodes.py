"""Servers that a test starts, stops, pauses and promotes."""

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from redis import Redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError
from redis.retry import Retry

from tests.scheduler.stalling_proxy import StallingProxy
from tests.system.server import free_port
from tests.waiting import until
from tidegate.supervision.process import dies_with_parent
from tidegate.valkey import EmbeddedValkey, find_binary

SERVICE = "tide"
SENTINEL_CONF = """port {port}
dir {folder}
sentinel monitor {service} 127.0.0.1 {primary} 1
sentinel down-after-milliseconds {service} {down_ms}
sentinel failover-timeout {service} 2000
"""


class Server:
    """An embedded server that a test may end and start again. Its TCP port is for replicas and Sentinels."""

    def __init__(self, valkey: EmbeddedValkey) -> None:
        self.valkey = valkey
        self.port = free_port()
        self.proxy: StallingProxy | None = None  # listens at the port instead of the server
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, *more: str) -> None:
        fast = ("--repl-diskless-sync-delay", "0")
        place = ("--port", "0" if self.proxy else str(self.port))
        announced = ("--replica-announce-ip", "127.0.0.1", "--replica-announce-port", str(self.port))
        argv = [*self.valkey.argv, *place, *announced, *fast, *more]
        self._process = subprocess.Popen(argv, pass_fds=self.valkey.pass_fds, preexec_fn=dies_with_parent())
        await until(self.valkey.is_ready)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(60)
            self._process = None

    def ask(self, *command: str | int) -> Any:
        """Return the answer of this very server to a command, also while a Sentinel cuts its clients off."""
        with Redis.from_url(self.valkey.url, retry=Retry(ConstantBackoff(0.05), 20)) as client:
            return client.execute_command(*command)

    async def follow(self, primary: "Server") -> None:
        """Become a replica of `primary`, and wait until it has the primary's data."""
        self.ask("REPLICAOF", "127.0.0.1", str(primary.port))
        await until(lambda: self.ask("INFO", "replication")["master_link_status"] == "up")

    async def has_all_of(self, primary: "Server") -> None:
        """Wait until this replica has everything that was written to `primary`."""
        written = primary.ask("INFO", "replication")["master_repl_offset"]
        await until(lambda: self.ask("INFO", "replication")["slave_repl_offset"] >= written)


@contextmanager
def embedded_server(data_dir: Path) -> Iterator[Server]:
    """Yield a server that is not started. It is killed at the end, also while it is paused."""
    with EmbeddedValkey(data_dir) as valkey:
        server = Server(valkey)
        try:
            yield server
        finally:
            server.end(signal.SIGKILL)


class Pair:
    """A primary and its replica. `url` is a name that leads to one of them, as DNS does for a managed store."""

    def __init__(self, first: Server, second: Server, name: Path) -> None:
        self.primary, self.replica = first, second
        self._name = name
        self._lead_to(first)

    @property
    def url(self) -> str:
        return f"unix://{self._name}"

    async def start(self) -> None:
        await self.primary.start()
        await self.replica.start()
        await self.replica.follow(self.primary)

    @asynccontextmanager
    async def behind_proxies(self) -> AsyncIterator[None]:
        """Let all ways to both servers, but that of `ask`, lead through proxies. Use it before their start."""
        async with AsyncExitStack() as proxies:
            for server in (self.primary, self.replica):
                server.proxy = StallingProxy(server.valkey.url, server.port)
                await proxies.enter_async_context(server.proxy.serving())
            yield

    async def promote(self) -> None:
        """Make the replica the primary. The name still leads to the old one."""
        self.part()
        self.primary, self.replica = self.replica, self.primary
        await self.replica.follow(self.primary)

    def part(self) -> None:
        """Make the replica a primary while the first one still takes writes: the replica will never have them."""
        self.replica.ask("REPLICAOF", "NO", "ONE")

    async def demote(self) -> None:
        """Let the parted primary lose its own writes and follow the other, to which the name leads from now on."""
        self.primary, self.replica = self.replica, self.primary
        self.rename()
        await self.replica.follow(self.primary)

    def rename(self) -> None:
        """Let the name lead to the primary."""
        self._lead_to(self.primary)

    def _lead_to(self, server: Server) -> None:
        link = self._name.with_suffix(".new")
        link.symlink_to(server.valkey.socket_path)
        os.replace(link, self._name)


@contextmanager
def server_pair(folder: Path) -> Iterator[Pair]:
    with embedded_server(folder / "a") as first, embedded_server(folder / "b") as second:
        yield Pair(first, second, folder / "store.sock")


class Sentinel:
    """A real Sentinel that watches a pair."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._client = Redis(port=port, retry=Retry(NoBackoff(), 0))

    @property
    def url(self) -> str:
        """The URL of its store. Nobody listens at the first of the two Sentinels that it names."""
        return f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self.port}/{SERVICE}"

    @property
    def port_of_primary(self) -> int:
        return int(self._client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def knows_replica(self) -> bool:
        with suppress(ConnectionError):  # it is still starting
            replicas = self._client.execute_command("SENTINEL REPLICAS", SERVICE)
            return any("disconnected" not in str(replica) for replica in replicas)
        return False

    def fail_over(self) -> None:
        self._client.execute_command("SENTINEL FAILOVER", SERVICE)


@asynccontextmanager
async def running_sentinel(folder: Path, pair: Pair, down_ms: int = 2000) -> AsyncIterator[Sentinel]:
    """Run a Sentinel that knows both of the pair, and takes one for dead that has been silent for `down_ms`."""
    port, conf = free_port(), folder / "sentinel.conf"
    values = {"port": port, "folder": folder, "service": SERVICE, "primary": pair.primary.port, "down_ms": down_ms}
    conf.write_text(SENTINEL_CONF.format(**values), encoding="utf-8")
    process = subprocess.Popen(
        [find_binary(), str(conf), "--sentinel"], stdout=subprocess.DEVNULL, preexec_fn=dies_with_parent()
    )
    sentinel = Sentinel(port)
    try:
        await until(sentinel.knows_replica)
        yield sentinel
    finally:
        process.kill()
        process.wait(60)


SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))  # of the three primaries of a cluster


class Cluster:
    """Three primaries that share all slots. `spare` are nodes that have none."""

    def __init__(self, nodes: list[Server], spare: list[Server]) -> None:
        self.nodes, self.spare = nodes, spare

    @property
    def url(self) -> str:
        """Nobody listens at the first of the nodes that it names."""
        return f"redis+cluster://127.0.0.1:1,{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    @staticmethod
    def url_of(node: Server) -> str:
        """The URL that names only this node."""
        return f"redis+cluster://127.0.0.1:{node.port}"

    async def start(self) -> None:
        """Return when all nodes know each other and take writes: two seconds after the start of the last node."""
        everyone = [*self.nodes, *self.spare]
        buses = [free_port() for _ in everyone]
        for number, (node, bus) in enumerate(zip(everyone, buses, strict=True), 1):
            cluster = ("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "1000")
            await node.start(*cluster)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number))
        for node, (first, last) in zip(self.nodes, SLOTS, strict=True):
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        for node, bus in zip(everyone[1:], buses[1:], strict=True):
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        await until(lambda: all(self._is_ready(node) for node in everyone))

    def primary_of(self, key: str) -> Server:
        """Return the node that has a key's slot, as it says itself. While a slot moves, it may be that none says so."""
        return next(node for node in (*self.nodes, *self.spare) if self._serves(node, key))

    async def move_slot(self, key: str) -> None:
        """Move a key's slot, with all its keys and at once, to another primary. Return when the old one knows it."""
        old = self.primary_of(key)
        new = next(node for node in self.nodes if node is not old)
        slot = key_slot(key.encode())
        old.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", new.ask("CLUSTER", "MYID"))
        await until(lambda: not self._serves(old, key))

    @staticmethod
    def _serves(node: Server, key: str) -> bool:
        """Whether a node says itself that it is the primary of a key's slot."""
        slot = key_slot(key.encode())
        ranges = node.ask("CLUSTER", "SLOTS")
        return any(first <= slot <= last and primary[1] == node.port for first, last, primary, *_ in ranges)

    def _is_ready(self, node: Server) -> bool:
        info = node.ask("CLUSTER INFO")
        num_nodes = len(self.nodes) + len(self.spare)
        return bool(info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == num_nodes)


@contextmanager
def server_cluster(folder: Path, num_spare: int = 0) -> Iterator[Cluster]:
    """Yield a cluster that is not started."""
    with ExitStack() as stack:
        servers = [stack.enter_context(embedded_server(folder / str(n))) for n in range(len(SLOTS) + num_spare)]
        yield Cluster(servers[: len(SLOTS)], servers[len(SLOTS) :])
