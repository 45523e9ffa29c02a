"""The server under test: a store, two workers and two gateways, kept running by the supervisor of `tidegate serve`.

Knows processes, their ways to the store, their clocks and disks; does not know faults or requests. Everything is on
127.0.0.1, in a folder of its own.
"""

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from bench.chaos.clock import Clocks
from bench.chaos.disk import Disks
from bench.chaos.link import Link
from loadtest.client.http import TargetError
from loadtest.machine import python_environment
from scheduler.store.connection import connect
from tidegate.settings.base import STORE_VARIABLE
from tidegate.supervision.keeper import Part, Stage
from tidegate.supervision.process import listen
from tidegate.supervision.supervisor import Supervisor
from tidegate.valkey import EmbeddedValkey

STORE = "store"
WORKERS = ("worker-1", "worker-2")
GATEWAYS = ("gateway-1", "gateway-2")
START_TIMEOUT_S = 120.0
DRAIN_S = 5.0  # seconds; at the end there is nothing left to finish
# Writes the part's output to a file. The store must survive a refused write of a file that is too large (SIGXFSZ).
SHELL = 'trap "" XFSZ; log=$1; shift; exec "$@" >>"$log" 2>&1'


class Site:
    """Use it as `async with`: all parts are ready within the block, and have ended after it."""

    def __init__(
        self,
        folder: Path,
        clocks: Clocks,
        disks: Disks,
        flags: tuple[str, ...] = (),
        sources: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        """`flags` are added to the commands of the workers. `sources` has the trees of parts that run from others."""
        self.folder = folder
        self.data_dir = folder / "data"
        self.clocks = clocks
        self.disks = disks
        self.links: dict[str, Link] = {}
        self.urls: dict[str, str] = {}  # address of each gateway
        self._flags = flags
        self.sources = sources
        self._markers: dict[str, str] = {}  # a text that only this part's command line has
        self._cleanup = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as cleanup:
            self._valkey = cleanup.enter_context(EmbeddedValkey(self.folder / "store"))
            self.store = await cleanup.enter_async_context(connect(self._valkey.url))
            for name in (*WORKERS, *GATEWAYS):
                self.links[name] = await cleanup.enter_async_context(Link(self._valkey.socket_path))
            ready = asyncio.Event()
            self._supervisor = Supervisor(self._parts(), drain_s=DRAIN_S, on_ready=ready.set)
            self._running = asyncio.create_task(self._supervisor.run())
            cleanup.push_async_callback(self._stop)
            await self._until_ready(ready)
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    async def until_end(self) -> None:
        """Return when the supervisor has given up a part, or was interrupted."""
        await asyncio.wait({self._running})

    @property
    def parts(self) -> tuple[str, ...]:
        return (STORE, *WORKERS, *GATEWAYS)

    @property
    def aof_dir(self) -> Path:
        return self._valkey.data_dir / "appendonlydir"

    def pid_of(self, part: str) -> int | None:
        """Return the process id of a part; None while it is being started again."""
        import psutil

        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and self._markers[part] in " ".join(process.cmdline()):
                    return int(process.pid)
        return None

    async def _until_ready(self, ready: asyncio.Event) -> None:
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((waiting, self._running), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            raise TargetError(f"the parts were not ready within {START_TIMEOUT_S:.0f} s: see the logs in {self.folder}")

    async def _stop(self) -> None:
        self._supervisor.stop()
        await self._running

    def _parts(self) -> list[Part]:
        valkey = self._valkey
        self._markers[STORE] = str(valkey.socket_path)
        preloading = self.clocks.env_of_store(STORE), self.disks.env(STORE, valkey.data_dir)
        env = {**python_environment(1), **with_all_preloaded(*preloading)}
        argv, pass_fds = self._argv(STORE, valkey.argv), valkey.pass_fds
        store = Part(STORE, Stage.STORE, argv, env, ready=valkey.is_ready, pass_fds=pass_fds)
        return [store, *map(self._worker, WORKERS), *map(self._gateway, GATEWAYS)]

    def _worker(self, name: str) -> Part:
        self._markers[name] = name
        return self._part(name, Stage.WORKER, ("worker", "--worker-id", name, "--threads", "1", *self._flags))

    def _gateway(self, name: str) -> Part:
        with listen("127.0.0.1", 0) as probe:
            port = str(probe.getsockname()[1])
        self._markers[name], self.urls[name] = port, f"http://127.0.0.1:{port}"
        command = ("gateway", "--port", port, "--data-dir", str(self.data_dir))
        return self._part(name, Stage.GATEWAY, command, self.disks.env(name, self.data_dir))

    def _part(self, name: str, stage: Stage, command: tuple[str, ...], disk: Mapping[str, str] | None = None) -> Part:
        argv = (sys.executable, "-P", "-m", "tidegate", *command)  # -P: the working directory may be another tree
        clock = self.clocks.env_of_python(name, self.sources.get(name))
        env = {**python_environment(1), **clock, **(disk or {})}
        env[STORE_VARIABLE] = self.links[name].url
        return Part(name, stage, self._argv(name, argv), env)

    def _argv(self, name: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        return ("/bin/sh", "-c", SHELL, name, str(self.folder / f"{name}.log"), *argv)


def with_all_preloaded(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return the environments as one, which preloads the libraries of each."""
    merged: dict[str, str] = {}
    for env in environments:
        libraries = filter(None, (merged.get("LD_PRELOAD"), env.get("LD_PRELOAD")))
        merged |= env
        if preloaded := ":".join(libraries):
            merged["LD_PRELOAD"] = preloaded
    return merged
