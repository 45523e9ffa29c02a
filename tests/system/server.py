"""A real `tidegate serve` for tests, on a free port and in a data directory of the test. The test ends it."""

import asyncio
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from openai import AsyncOpenAI

START_TIMEOUT_S = 90.0  # an idle machine needs a few seconds, a busy one much longer


_numbers = itertools.count(random.SystemRandom().randrange(12_000))  # two processes of a test run do not go along


def free_port() -> int:
    """Return a port on which nobody listens, and which no call before returned.

    Outgoing connections do not get it either: theirs are from 32768 on.
    """
    while True:
        port = 20_000 + next(_numbers) % 12_000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0, what: str = "") -> None:
    """Poll until `condition()` holds. Fail with `what` after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.02)


class Server:
    """One running command, its log and its address."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int, data_dir: Path) -> None:
        self.process = process
        self.log = log
        self.port = port
        self.root = f"http://127.0.0.1:{port}"
        self.base_url = f"{self.root}/v1"
        self.data_dir = data_dir
        self.socket_url = f"unix://{data_dir}/valkey.sock"

    def log_lines(self) -> list[dict[str, object]]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def pid_of(self, part: str) -> int:
        """Return the newest process id of a part, from the supervisor's log."""
        starts = [line for line in self.log_lines() if line["event"] == "started" and line["part"] == part]
        pid = starts[-1]["pid"]
        assert isinstance(pid, int)
        return pid

    def has_logged(self, event: str) -> bool:
        return any(line["event"] == event for line in self.log_lines())

    def workers(self) -> list[str]:
        """Return the ids of the workers that the gateway sees, whether it is ready or not."""
        return [str(worker["id"]) for worker in httpx.get(f"{self.root}/ready", timeout=10).json()["workers"]]

    def kill(self, part: str) -> int:
        """Kill a part with SIGKILL. Return its pid."""
        pid = self.pid_of(part)
        os.kill(pid, signal.SIGKILL)
        return pid

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.root}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.log.read_text()[-2000:]}"
            return self.is_ready()

        wait_for(ready, timeout_s, "the server to be ready")

    async def end(self) -> None:
        """End the command while the event loop goes on, which a proxy on the way to its store needs."""
        self.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait, 60)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of `name` whose labels include `labels`."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in httpx.get(f"{self.root}/metrics", timeout=30).text.splitlines():
            if line.startswith((name + "{", name + " ")) and all(w in line for w in wanted):
                total += float(line.rsplit(" ", 1)[1])
        return total


@contextmanager
def running(
    data_dir: Path,
    *flags: str,
    command: str = "serve",
    program: tuple[str, ...] = ("-m", "tidegate"),
    port: int | None = None,
) -> Iterator[Server]:
    """Start `tidegate <command>` with `flags`. End it with SIGTERM, and with SIGKILL if that is not enough.

    `program` is what Python runs, if the test changes a constant in it. Without a `port`, a free one is drawn.
    """
    port = port or free_port()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = data_dir / f"{command}-{port}.log"
    argv = [sys.executable, *program, command, *flags]
    if command != "worker":
        argv += ["--port", str(port), "--data-dir", str(data_dir)]
    with log.open("ab") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)
    try:
        yield Server(process, log, port, data_dir)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_to_end(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run `tidegate <arguments>` until it ends by itself."""
    argv = [sys.executable, "-m", "tidegate", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s)


def make_client(server: Server, max_retries: int = 0, timeout_s: float = 120) -> AsyncOpenAI:
    """Return a client that fails at once by default: a retry would hide what a test looks for."""
    return AsyncOpenAI(base_url=server.base_url, api_key="test", max_retries=max_retries, timeout=timeout_s)
