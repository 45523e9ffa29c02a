"""Runs many of the product's clients of a store at a low cost, so that the store is what limits a load.

A client is a coroutine with a connection of its own, a plain socket, and with one command or pipeline in flight. The
product's queue and events write the commands. Knows sockets and coroutines; does not know what is stored.
"""

import heapq
import itertools
import select
import socket
import time
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any

import hiredis
from redis._parsers.base import BaseParser
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Pause:
    """What a client awaits: the reply to a packed command (empty: the next reply or message), or else a time."""

    command: bytes | None = None
    until_s: float = 0.0

    def __await__(self) -> "Generator[Pause, Any, Any]":
        return (yield self)


def packed(args: Any) -> bytes:
    command: bytes = hiredis.pack_command((*args[0].split(), *args[1:]))
    return command


class WireClient(Redis):
    """A client of redis-py whose commands `Wires` sends."""

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return WirePipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        reply = await Pause(packed(args))
        if isinstance(reply, Exception):
            raise reply
        callback = self.response_callbacks.get(args[0])
        return reply if callback is None else callback(reply, **options)


class WirePipeline(Pipeline):
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = b"".join(packed(args) for args, _ in self.command_stack)
        num_others, self.command_stack = len(self.command_stack) - 1, []
        return [await Pause(command) for command in (commands, *[b""] * num_others)]


class Wire:
    """One client: its coroutine, its connection, and what it awaits."""

    def __init__(self, path: str, run: Coroutine[Pause, Any, None]) -> None:
        self.run = run
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.reader = hiredis.Reader(replyError=BaseParser.parse_error)
        self.timer = 0  # number of the sleep that it is in; 0: none


class Wires:
    """An event loop for wires to a store at a Unix socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._epoll = select.epoll()
        self._wires: dict[int, Wire] = {}
        self._timers: list[tuple[float, int, Wire]] = []
        self._numbers = itertools.count(1)

    def add(self, run: Coroutine[Pause, Any, None]) -> Wire:
        """Start a client, and return its wire."""
        wire = Wire(self._path, run)
        self._wires[wire.socket.fileno()] = wire
        self._epoll.register(wire.socket.fileno(), select.EPOLLIN)
        self._advance(wire, None)
        return wire

    def wake(self, wire: Wire) -> None:
        """End the sleep of a client, if it sleeps."""
        if wire.timer:
            self._advance(wire, None)

    def run(self, until: Coroutine[Pause, Any, None]) -> None:
        """Run all clients until this one has ended, and then close all."""
        last = self.add(until)
        while last.socket.fileno() in self._wires:
            self._turn()
        for wire in self._wires.values():
            wire.run.close()
            wire.socket.close()
        self._epoll.close()

    def _turn(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            _, number, wire = heapq.heappop(self._timers)
            if wire.timer == number:
                self._advance(wire, None)
        left_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for descriptor, _ in self._epoll.poll(left_s):
            wire = self._wires[descriptor]
            wire.reader.feed(wire.socket.recv(READ_BYTES))
            while (reply := wire.reader.gets()) is not False:
                self._advance(wire, reply)

    def _advance(self, wire: Wire, reply: Any) -> None:
        """Go on with a client until it awaits something."""
        wire.timer = 0
        try:
            pause = wire.run.send(reply)
        except StopIteration:
            self._epoll.unregister(wire.socket.fileno())
            del self._wires[wire.socket.fileno()]
            wire.socket.close()
            return
        if pause.command is None:
            wire.timer = next(self._numbers)
            heapq.heappush(self._timers, (pause.until_s, wire.timer, wire))
        elif pause.command:
            wire.socket.sendall(pause.command)
