"""`python -m bench door`: what attacks without a key do to another client's stream, beside the same stream in peace.

The server, the attacker and the client are processes of their own on 127.0.0.1. Each attack has its turn right after
a turn of peace, so that what else the machine does meets both alike.
"""

import asyncio
import multiprocessing
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import numpy as np
from pydantic import BaseModel, Field

from loadtest.client.answer import Outcome
from loadtest.client.http import Target, TargetError, completion_body, send
from loadtest.reporting.record import Provenance, Record, Section, Table
from loadtest.reporting.writers import publish
from loadtest.running import ends_on_sigterm, one_sentence, print_progress, run_to_end
from loadtest.serving import serving, tidegate_command, tidegate_environment

GOAL_MS = 50.0  # by which an attack may lengthen a gap
ANSWER_TOKENS = 200
REPLY_S = 5.0  # seconds for which an attacker waits for an answer
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhl\r\n\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def tiny_chunks(door: socket.socket) -> None:
    """Send chunks of one byte."""
    door.sendall(CHAT + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        door.sendall(b"1\r\na\r\n" * 10_000)


def upgrade(door: socket.socket) -> None:
    """Ask for a websocket, and leave."""
    door.sendall(HEALTH + UPGRADE)
    door.recv(4096)


def pipeline(door: socket.socket) -> None:
    """Send thousands of requests at once."""
    door.sendall((HEALTH + b"\r\n") * 5000)
    while door.recv(2**20):
        pass


def long_content(door: socket.socket) -> None:
    """Send 15 MB of plain content."""
    _post(door, b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"a " * 7_500_000))


def many_names(door: socket.socket) -> None:
    """Send 700,000 names that are unknown."""
    _post(door, b'{"messages": [], %s}' % b", ".join(b'"n%d": 0' % number for number in range(700_000)))


def many_arrays(door: socket.socket) -> None:
    """Send 80,000 empty arrays."""
    _post(door, b'{"messages": [%s]}' % b",".join([b"[]"] * 80_000))


ATTACKS: dict[str, Callable[[socket.socket], None]] = {
    "chunks of one byte (row 14)": tiny_chunks,
    "upgrades to websockets (row 15)": upgrade,
    "5,000 pipelined requests (row 16)": pipeline,
    "15 MB of plain content (row 18)": long_content,
    "700,000 unknown names (row 18)": many_names,
    "80,000 empty arrays (row 18)": many_arrays,
}


def _post(door: socket.socket, body: bytes) -> None:
    door.sendall(CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    door.recv(4096)


def attack_for_ever(name: str, place: tuple[str, int]) -> None:
    """Repeat an attack, each time on a new connection, until the process is ended."""
    while True:
        with suppress(OSError), socket.create_connection(place, timeout=REPLY_S) as door:
            ATTACKS[name](door)


class Door(BaseModel):
    """What attacks without a key do to the gaps in another client's stream: they may grow by 50 ms at most."""

    duration: float = Field(10.0, gt=0, le=600, description="Seconds of each attack, and of the peace before it.")
    json_file: Path | None = Field(None, alias="json", description="Write the results to this file as JSON.")

    def cli_cmd(self) -> None:
        with ends_on_sigterm(), one_sentence(TargetError, said_by="door"):
            run_to_end(self._run())

    async def _run(self) -> None:
        measured = {}
        with tempfile.TemporaryDirectory(prefix="tidegate-door-") as folder:
            command = tidegate_command(None, "auto", Path(folder) / "data", None, ())
            log = Path(folder) / "server.log"
            async with serving(command, log, "/ready", tidegate_environment()) as server:
                await gaps_s(server.target, min(self.duration, 2.0))  # warms the server up
                for name in ATTACKS:
                    calm = await gaps_s(server.target, self.duration)
                    async with _attacked(name, (server.target.host, server.target.port)):
                        measured[name] = calm, await gaps_s(server.target, self.duration)
                    print_progress(f"{name}: done")
        publish(door_record(measured), self.json_file)


@asynccontextmanager
async def _attacked(name: str, place: tuple[str, int]) -> AsyncIterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=attack_for_ever, args=(name, place), daemon=True)
    process.start()
    try:
        await asyncio.sleep(1.0)  # the attacker has started
        yield
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


async def gaps_s(target: Target, seconds: float) -> list[float]:
    """Stream one answer after the other for some seconds, and return the gaps between their events, in seconds."""
    path, body = completion_body(target, "How much is 17 + 25?", ANSWER_TOKENS)
    gaps: list[float] = []
    end_s = perf_counter() + seconds
    while perf_counter() < end_s:
        outcome = Outcome("client", 0, due_s=perf_counter())
        await send(target, path, body, outcome, streamed=True)
        if outcome.error is not None:
            raise TargetError(f"the stream failed: {outcome.error}")
        gaps += [now_s - before_s for (before_s, _), (now_s, _) in pairwise(outcome.progress)]
    return gaps


def door_record(measured: dict[str, tuple[list[float], list[float]]]) -> Record:
    """Return the gaps of each attack beside those of the peace before it."""
    rows = []
    for name, (calm, attacked) in measured.items():
        figures = [(*np.quantile(gaps, (0.5, 0.99)), max(gaps)) for gaps in (calm, attacked)]
        longer_ms = 1000 * max(after - before for before, after in zip(*figures, strict=True))
        cells = (" / ".join(f"{1000 * figure:.1f}" for figure in part) for part in figures)
        rows.append((name, *cells, f"{longer_ms:.1f}", "yes" if longer_ms <= GOAL_MS else "NO"))
    header = ("attack", "in peace: p50 / p99 / max ms", "attacked", "longer by", f"≤ {GOAL_MS:.0f} ms")
    section = Section("Gaps in another client's stream", Table.of(header, rows))
    return Record("The door", [section], {"gaps_s": measured}, Provenance.of_this_run("demo", seed=0))
