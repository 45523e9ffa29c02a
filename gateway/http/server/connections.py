"""All connections of the server: how many there may be, and when the server closes one.

Knows addresses and times; does not know HTTP's format, nor what requests mean. A client must send a request's headers
within a time and its body at a minimum rate, and must accept the answer. If too many connections are open, a new one
takes the place of the connection that has kept the server waiting longest. So clients that connect and send nothing
cannot keep others out.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

LOG_PERIOD_S = 60.0  # seconds between two log lines about closed connections, however many there are
SWEEPS_PER_TIMEOUT = 10  # a timeout is noticed late by at most a tenth of the shortest timeout
MAX_CONNECTIONS = 2**14  # default limit where the limit of descriptors is higher; idle, they take about 150 MB
# Descriptors that are no connections: the store's, files, and connections that the kernel accepts at once.
RESERVED_DESCRIPTORS = 2304


class Closed(StrEnum):
    """Why the server closed a connection or refused it. The values are labels of a metric."""

    SLOW_HEADERS = "slow_headers"
    SLOW_BODY = "slow_body"
    SLOW_READER = "slow_reader"
    LARGE_HEADERS = "large_headers"
    REPLACED = "replaced"  # by a new connection, when there were too many
    TOO_MANY = "too_many"  # refused: all other connections were busy


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`max_per_address` does not apply to the `exempt` addresses, such as those of proxies."""

    max_connections: int = MAX_CONNECTIONS
    max_per_address: int = MAX_CONNECTIONS * 3 // 4
    exempt: Callable[[str], bool] = lambda address: False
    max_header_bytes: int = 64 * 2**10
    receive_timeout_s: float = 10.0  # seconds for a request's headers, and for the longest pause in its body
    body_bytes_per_s: float = 1024.0  # rate, over `receive_timeout_s`, below which a body is given up
    send_timeout_s: float = 60.0  # seconds in which a client must accept more of an answer


def default_max_connections(max_descriptors: int) -> int:
    """Return how many connections a process may have that may open `max_descriptors` descriptors."""
    return min(MAX_CONNECTIONS, max_descriptors - min(max_descriptors // 2, RESERVED_DESCRIPTORS))


class Connection(Protocol):
    """The part of a connection that the table uses. `address` is that of the peer, without the port."""

    address: str

    @property
    def is_sending_body(self) -> bool:
        """Whether the client has sent a request's headers, and not all of its body."""

    @property
    def is_read_paused(self) -> bool:
        """Whether the server does not read at the moment, so that the client is not to blame for missing bytes."""

    @property
    def num_unsent(self) -> int:
        """Bytes of answers that the client has not accepted yet, beyond what the kernel holds."""

    def give_up(self, reason: Closed) -> None:
        """Close the connection, with an error for the client if one can still be sent."""

    def abort(self) -> None:
        """Close the connection at once. Unsent bytes are lost."""


class ParsingConnection(Protocol):
    """A connection that has received more bytes than it may parse in one turn."""

    def parse_more(self) -> None:
        """Parse for one turn. If bytes are left, wait for another turn."""


class ConnectionTable:
    """The open connections by what the server waits for. Each dict is in the order of the connections' last progress.

    The server waits for more of a request, for the next request of an idle connection, or until a client accepts bytes.
    """

    def __init__(self, limits: ConnectionLimits, count_closed: Callable[[str], None]) -> None:
        self.limits = limits
        self._count_closed = count_closed
        self._num_open = 0
        self._num_by_address: Counter[str] = Counter()
        self._sending: dict[Connection, float] = {}  # clients that must send more, and their deadlines
        self._idle: dict[Connection, None] = {}
        self._unsent: dict[Connection, float] = {}  # clients that must accept bytes, and their deadlines
        self._closed: Counter[Closed] = Counter()  # since the last log line
        self._logged_s = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._turns: deque[ParsingConnection] = deque()  # the first one's turn is the next

    def __len__(self) -> int:
        return self._num_open

    def admit(self, connection: Connection) -> bool:
        """Count a new connection, and close another one for it if there are too many. Return False if none can be."""
        is_admitted = self._make_room(connection.address)
        self._num_open += 1
        self._num_by_address[connection.address] += 1
        if is_admitted:
            self.await_more(connection)
        if self._timer is None:
            self._sweep_later()
        return is_admitted

    def forget(self, connection: Connection) -> None:
        """Remove a connection that is closed."""
        self.clear(connection)
        self._unsent.pop(connection, None)
        self._num_open -= 1
        self._num_by_address[connection.address] -= 1
        if self._num_by_address[connection.address] == 0:
            del self._num_by_address[connection.address]

    def clear(self, connection: Connection) -> None:
        """Note that the server waits for nothing from the client."""
        self._sending.pop(connection, None)
        self._idle.pop(connection, None)

    def await_more(self, connection: Connection, num_bytes: int = 0) -> None:
        """Note that the client must send more of a request, and that `num_bytes` more bytes of its body have come.

        Only these bytes gain time: no credit beyond one timeout, however fast earlier bytes came.
        """
        latest = self._now() + self.limits.receive_timeout_s
        deadline = self._sending.get(connection)
        if deadline is None or num_bytes:
            self.clear(connection)
            self._sending[connection] = min(latest, (deadline or latest) + num_bytes / self.limits.body_bytes_per_s)

    def await_request(self, connection: Connection) -> None:
        """Note that the connection is idle."""
        self.clear(connection)
        self._idle[connection] = None

    def await_reader(self, connection: Connection) -> None:
        """Note that bytes wait until the client accepts them."""
        self._unsent[connection] = self._now() + self.limits.send_timeout_s

    def await_turn(self, connection: ParsingConnection) -> None:
        """Let a connection parse more when the event loop has done what else is due, and others had their turns."""
        self._turns.append(connection)
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._give_turn)

    def note(self, reason: Closed, address: str) -> None:
        """Count a closed connection. Log at most one line for each `LOG_PERIOD_S`."""
        self._count_closed(reason.value)
        self._closed[reason] += 1
        if self._now() - self._logged_s >= LOG_PERIOD_S:
            self._logged_s = self._now()
            counts = {reason.value: count for reason, count in self._closed.items()}
            log.warning("connections_closed", client=address, open=self._num_open, **counts)
            self._closed.clear()

    def _give_turn(self) -> None:
        connection = self._turns.popleft()
        if self._turns:
            asyncio.get_running_loop().call_soon(self._give_turn)
        connection.parse_more()

    def _make_room(self, address: str) -> bool:
        limits = self.limits
        # Those that cost their clients least if they are closed come first, then those without progress for longest.
        of_headers = (c for c in self._sending if not c.is_sending_body)
        replaceable = chain(of_headers, self._idle, self._sending)
        if self._num_by_address[address] >= limits.max_per_address and not limits.exempt(address):
            return self._replace(c for c in replaceable if c.address == address)
        return self._num_open < limits.max_connections or self._replace(replaceable)

    def _replace(self, candidates: Iterable[Connection]) -> bool:
        victim = next(iter(candidates), None)
        if victim is None:
            return False
        self.clear(victim)
        victim.give_up(Closed.REPLACED)
        return True

    def _sweep(self) -> None:
        now = self._now()
        for connection in [c for c, deadline in self._sending.items() if deadline <= now]:
            if connection.is_read_paused:
                self._sending[connection] = now + self._period_s
            else:
                self.clear(connection)
                connection.give_up(Closed.SLOW_BODY if connection.is_sending_body else Closed.SLOW_HEADERS)
        for connection in [c for c, deadline in self._unsent.items() if deadline <= now or c.num_unsent == 0]:
            del self._unsent[connection]
            if connection.num_unsent:
                self.note(Closed.SLOW_READER, connection.address)
                connection.abort()
        self._timer = None
        if self._num_open:
            self._sweep_later()

    def _sweep_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._sweep)

    @property
    def _period_s(self) -> float:
        return min(self.limits.receive_timeout_s, self.limits.send_timeout_s) / SWEEPS_PER_TIMEOUT

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
