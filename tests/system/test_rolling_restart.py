"""Two gateways behind a real HAProxy are restarted one after the other, at 50 requests a second: none is refused.

In the order of the Helm chart (the proxy lets go of a gateway, then it gets SIGTERM), and in that of the compose file
(SIGTERM, and the proxy learns from /ready).
"""

import asyncio
import random
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from scheduler.config import shipped_tiers_path
from tests.system.nonces import body, make_nonce
from tests.system.server import Server, free_port, running, wait_for
from tests.system.streams import long_streams
from tidegate.valkey import running_valkey

CONFIGURATION = Path(__file__).parents[2] / "docker" / "haproxy.cfg"
RETRIES = "retry-on conn-failure 503"
RATE = 50  # requests a second
LIMIT_S = 150.0  # the load ends by itself
GATEWAYS = ("gateway-1", "gateway-2")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="no `haproxy` on the PATH (apt-get install haproxy)"),
]


class Proxy:
    """A running HAProxy, and its socket for operators."""

    def __init__(self, port: int, socket_path: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._socket = socket_path

    def command(self, text: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._socket))
            connection.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def column(self, gateway: str, name: str) -> str:
        """Return a column of HAProxy's statistics about a gateway, such as `status` or `scur`, its open requests."""
        header, *rows = self.command("show stat").splitlines()
        names = header.removeprefix("# ").split(",")
        (row,) = [row.split(",") for row in rows if row.startswith(f"tidegate,{gateway},")]
        return row[names.index(name)]

    def is_up(self, gateway: str) -> bool:
        return self.column(gateway, "status").startswith("UP")


@contextmanager
def proxied(folder: Path, ports: dict[str, int], *, retries: bool) -> Iterator[Proxy]:
    """Run HAProxy with the shipped configuration before gateways of this machine."""
    folder.mkdir()
    port, operators = free_port(), folder / "haproxy.sock"
    changes = [
        ("bind :8000", f"bind 127.0.0.1:{port}"),
        ("global\n", f"global\n    stats socket {operators} level admin\n"),
    ]
    changes += [(f"server {name} {name}:8000", f"server {name} 127.0.0.1:{ports[name]}") for name in GATEWAYS]
    changes += [] if retries else [(RETRIES, "")]
    configuration = CONFIGURATION.read_text(encoding="utf-8")
    for old, new in changes:
        assert configuration.count(old) == 1, old
        configuration = configuration.replace(old, new)
    file = folder / "haproxy.cfg"
    file.write_text(configuration)
    checked = subprocess.run(["haproxy", "-c", "-f", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(["haproxy", "-db", "-f", file])
    try:
        wait_for(operators.exists, what="HAProxy to start")
        yield Proxy(port, operators)
    finally:
        process.terminate()
        process.wait()


class Load:
    """Chats at a constant rate until `stop` is set, or for `LIMIT_S`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses: list[int | str] = []
        self.stop = asyncio.Event()
        self.seconds = 0.0

    async def run(self) -> None:
        began_s = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client, asyncio.TaskGroup() as requests:
            for number in count():
                requests.create_task(self._ask(client, number))
                left_s = began_s + (number + 1) / RATE - time.monotonic()
                if await self._stopped_within(left_s) or time.monotonic() - began_s > LIMIT_S:
                    break
            self.seconds = time.monotonic() - began_s

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.stop.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        nonce = make_nonce(random.Random(number))
        try:
            answer = await client.post("/v1/chat/completions", json=body(nonce, max_tokens=1))
        except httpx.TransportError as error:
            self.statuses.append(repr(error))
        else:
            self.statuses.append(answer.status_code)


@asynccontextmanager
async def loaded(url: str) -> AsyncIterator[Load]:
    load = Load(url)
    running_load = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        load.stop.set()
        await running_load


def patient_tiers(folder: Path) -> Path:
    """A tiers file with which a slow machine refuses nothing."""
    shipped = shipped_tiers_path().read_text()
    for short, long in (("patience_ms: 10000", "patience_ms: 180000"), ("timeout_ms: 60000", "timeout_ms: 180000")):
        assert short in shipped
        shipped = shipped.replace(short, long)
    path = folder / "tiers.yaml"
    path.write_text(shipped)
    return path


class Fleet:
    """Two gateways on fixed ports, each of which can be replaced by a new process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.ports = {name: free_port() for name in GATEWAYS}
        self._folder = folder
        self._flags = (*flags, "--files-url", f"file://{folder / 'files'}")
        self._running: dict[str, tuple[Server, ExitStack]] = {}

    def start(self, name: str) -> Server:
        stack = ExitStack()
        started = running(self._folder / name, *self._flags, command="gateway", port=self.ports[name])
        server = stack.enter_context(started)
        self._running[name] = server, stack
        return server

    def stop(self, name: str) -> None:
        """Send SIGTERM, and wait for the end, which must be a clean one."""
        server, stack = self._running.pop(name)
        stack.close()
        assert server.process.returncode == 0

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_for, condition, 60, what)


async def restart(fleet: Fleet, proxy: Proxy, name: str, *, lets_go: bool) -> None:
    """Restart a gateway, and wait until it serves again. With `lets_go`, the proxy sends it nothing meanwhile."""
    if lets_go:
        proxy.command(f"set server tidegate/{name} state drain")
        await until(lambda: proxy.column(name, "status") == "DRAIN", "the proxy to let go")
    await asyncio.to_thread(fleet.stop, name)
    await asyncio.to_thread(fleet.start(name).wait_until_ready)
    if lets_go:
        proxy.command(f"set server tidegate/{name} state ready")
    served = int(proxy.column(name, "stot"))
    await until(lambda: proxy.is_up(name) and int(proxy.column(name, "stot")) > served + 10, f"{name} to serve")


@pytest.mark.parametrize("order", ["the chart's", "the compose file's"])
async def test_a_rolling_restart_refuses_no_request(tmp_path: Path, order: str) -> None:
    lets_go = order == "the chart's"
    with running_valkey(tmp_path / "store") as store, ExitStack() as stack:
        flags = ("--redis-url", store, "--tiers", str(patient_tiers(tmp_path)))
        fleet = Fleet(tmp_path, *flags)
        stack.callback(fleet.close)
        stack.enter_context(running(tmp_path / "worker", *flags, command="worker"))
        for server in [fleet.start(name) for name in GATEWAYS]:
            server.wait_until_ready()
        proxy = stack.enter_context(proxied(tmp_path / "proxy", fleet.ports, retries=not lets_go))
        wait_for(lambda: all(map(proxy.is_up, GATEWAYS)), what="both gateways to be up")
        async with (
            AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="test", max_retries=0, timeout=120) as client,
            long_streams(client, 2) as streams,
            loaded(proxy.url) as load,
        ):
            await until(lambda: len(load.statuses) > RATE, "the load to run")
            for name in GATEWAYS:
                await restart(fleet, proxy, name, lets_go=lets_go)
            assert await asyncio.gather(*streams) == ["length", "length"]
    assert set(load.statuses) == {200}
    assert len(load.statuses) > 0.8 * RATE * load.seconds > RATE
