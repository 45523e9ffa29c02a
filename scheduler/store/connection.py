"""Connections to Redis or Valkey: all timeouts, retries and reconnects are set here.

Knows servers and sockets; does not know what is stored. `scheduler.store.address` says which URLs there are. Works with
Redis 6.2 or newer and with any Valkey.
"""

import asyncio
import builtins
import contextvars
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import hiredis
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, ResponseError, TimeoutError

from scheduler.store import address
from scheduler.store.errors import StoreRefused, is_of_wrong_node, refusal_of
from scheduler.store.route import Route

REPLY_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32  # per process; a command beyond this limit waits for a free connection instead of failing
HEALTH_CHECK_S = 15  # a connection that was idle for longer is checked with a PING before the next command
RETRIES = 10  # they take about two seconds if the server refuses connections, which is long enough for its restart
# Limit for a command with all its retries. It detects a server that accepts connections but never answers.
COMMAND_TIMEOUT_S = 6.0
FIRST_BACKOFF_S = 0.01  # upper bound of the pause after the first failure; it doubles with each further failure
MAX_BACKOFF_S = 0.5
MAX_DOUBLINGS = 16
# After this time without a message, subscribe again: the connection may be broken without being closed.
RESUBSCRIBE_S = 10.0
FOREVER = -1  # given as the number of retries, it makes redis-py retry without a limit

Command = bytes | str | Iterable[bytes]


def connect(url: str) -> Redis:
    """Return a client with a pool of connections. No connection is opened yet. Raises `ValueError` for a wrong URL.

    Commands are retried during a short outage of the server. If the outage lasts longer, they raise
    `redis.exceptions.ConnectionError`, or `TimeoutError` after `COMMAND_TIMEOUT_S`; opening a connection may take the
    same time again. If the reply to a command is lost, the command is sent again. So callers must send only commands
    that may run twice. If the server refuses a write, the command raises `StoreRefused`, which is a `ConnectionError`.

    A node that says it is not the primary, or that does not answer in time, is left: all connections are opened again,
    to where the name leads then.
    """
    settings, route = address.parse(url)
    theirs = settings.pop("connection_class", Connection)
    ours: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": REPLY_TIMEOUT_S,
        "protocol": 2,
        "socket_connect_timeout": address.CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "retry": (_TlsRetry if theirs is SSLConnection else _BoundedRetry)(_backoff(), RETRIES),
        "route": route,
    }
    return Redis.from_pool(_Pool(connection_class=_OURS[theirs], **(ours | settings)))


def blocking(client: Redis, longest_s: float) -> Redis:
    """Return a second client to the same server, for reads that wait up to `longest_s`. The caller closes it.

    The client reconnects without a limit, also after a read has timed out, because a server that disappears may leave
    the connection open.
    """
    pool = client.connection_pool
    timeout_s = longest_s + REPLY_TIMEOUT_S
    settings = {**pool.connection_kwargs, "socket_timeout": timeout_s, "retry": _Retry(_backoff(), FOREVER)}
    own_pool = ConnectionPool(connection_class=pool.connection_class, **settings)
    return Redis.from_pool(own_pool)


async def messages(client: Redis, *channels: str) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of pub/sub channels for ever, and also the confirmation of each (new) subscription.

    Messages that are sent between two subscriptions are missed. So a confirmation means "something may have happened".
    """
    reader = blocking(client, RESUBSCRIBE_S)
    try:
        while True:
            async for message in _messages_until_silent(reader.pubsub(), channels):
                yield message
    finally:
        await reader.aclose()


async def _messages_until_silent(pubsub: PubSub, channels: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    try:
        await pubsub.subscribe(*channels)
        while (message := await pubsub.get_message(timeout=RESUBSCRIBE_S)) is not None:
            yield message
    finally:
        await pubsub.aclose()  # type: ignore[no-untyped-call]


class _Pool(BlockingConnectionPool):
    """A pool that has its route watched from its first use until its client is closed."""

    _watching: asyncio.Task[None] | None = None
    _num_waiting = 0  # callers for whom there was no free connection

    async def get_connection(self, *args: Any, **options: Any) -> AbstractConnection:
        route: Route = self.connection_kwargs["route"]
        if route.guides and self._watching is None:
            # A new context: log lines must not name the request that happens to come first.
            self._watching = asyncio.create_task(route.watch(), context=contextvars.Context())
        connection: AbstractConnection
        if self._num_waiting == 0 and self.can_get_connection():  # without redis-py's lock and time limit
            connection = self.get_available_connection()  # type: ignore[no-untyped-call]
            try:
                await self.ensure_connection(connection)
            except BaseException:
                await self.release(connection)
                raise
            return connection
        self._num_waiting += 1
        try:
            connection = await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]
        finally:
            self._num_waiting -= 1
        return connection

    async def disconnect(self, *args: Any, **options: Any) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
            self._watching = None
        await super().disconnect(*args, **options)


class _OurConnection(AbstractConnection):
    """A connection that leaves a wrong node, and that sends without `asyncio.wait_for`.

    When a connection finds that its node is not the primary or does not answer, all others are opened anew before their
    next use. Otherwise, idle ones would read old data, or wait for the dead node, one after the other. When there is
    another primary, commands that wait for the old one are cut off at once, and are tried again.
    """

    def __init__(self, *, route: Route, **settings: Any) -> None:
        self._route = route
        self._changes_at_connect = 0
        super().__init__(**settings)
        route.connections.add(self)

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def connect(self) -> None:
        if self._changes_at_connect != self._route.changes:
            await self.disconnect(nowait=True)
        if not self.is_connected:  # redis-py would find out only behind its retries, before each command
            await super().connect()  # type: ignore[no-untyped-call]

    def pack_command(self, *args: Any) -> list[bytes]:
        """Pack a command in C. On asynchronous connections, redis-py does it in Python, argument by argument."""
        name = args[0].encode() if isinstance(args[0], str) else args[0]
        try:
            return [hiredis.pack_command((*name.split(), *args[1:]))]
        except TypeError:  # it knows fewer types
            return super().pack_command(*args)

    async def _connect(self) -> None:
        if (primary := await self._route.primary()) is not None:
            self.host, self.port = primary
        self._changes_at_connect = self._route.changes
        await super()._connect()  # type: ignore[no-untyped-call, safe-super]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except TimeoutError:
            self._route.changes += 1
            raise
        except (ResponseError, ConnectionError) as error:
            if not is_of_wrong_node(error):
                raise
            self._route.changes += 1
            await self.disconnect(nowait=True)
            raise refusal_of(error) or error from None  # a `ConnectionError`, so that redis-py tries again

    async def send_packed_command(self, command: Command, check_health: bool = True) -> None:
        """Send with the same time limit as redis-py, but without `asyncio.wait_for`.

        Before Python 3.12, `asyncio.wait_for` may swallow the cancellation of the sending task (cpython #86296). It
        also creates a task for each command.
        """
        timeout_s, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(timeout_s):
                await super().send_packed_command(command, check_health)
        except builtins.TimeoutError as error:
            raise TimeoutError("Timeout writing to socket") from error
        finally:
            self.socket_timeout = timeout_s


class _Tcp(_OurConnection, Connection):
    pass


class _Tls(_OurConnection, SSLConnection):
    async def _connect(self) -> None:
        try:
            await super()._connect()
        except ssl.SSLCertVerificationError as error:
            raise ConnectionError(
                f"The certificate of {self.host}:{self.port} is not trusted: {error.verify_message}. The store's URL "
                "needs a name that its certificate has, and ?ssl_ca_certs=FILE with its authority if that is your own."
            ) from error


class _Unix(_OurConnection, UnixDomainSocketConnection):
    pass


_OURS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}


class _Retry(Retry):
    """A retry policy that turns the server's refusals into `StoreRefused`.

    A command whose reply to an earlier attempt was lost may have been executed. Its refusal is a `ConnectionError`.
    """

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *args: Any, **options: Any) -> Any:
        may_have_run = False

        async def attempt() -> Any:
            nonlocal may_have_run
            try:
                return await do()
            except (ConnectionError, TimeoutError) as error:
                may_have_run |= not isinstance(error, (StoreRefused, BusyLoadingError))
                raise

        try:
            return await super().call_with_retry(attempt, *args, **options)
        except (ResponseError, BusyLoadingError, StoreRefused) as error:
            refusal = error if isinstance(error, StoreRefused) else refusal_of(error)
            if refusal is None:
                raise
            # the message of redis-py may contain the arguments of commands, such as prompts
            raise (ConnectionError(str(refusal)) if may_have_run else refusal) from None


class _BoundedRetry(_Retry):
    """A retry policy that ends a command after `COMMAND_TIMEOUT_S`, retries included."""

    advice = ""

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *args: Any, **options: Any) -> Any:
        timeout_s = COMMAND_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                return await super().call_with_retry(do, *args, **options)
        except builtins.TimeoutError as error:
            raise TimeoutError(f"The store has not answered within {timeout_s:.0f} seconds.{self.advice}") from error


class _TlsRetry(_BoundedRetry):
    advice = " If it has no TLS, its URL begins with redis in place of rediss."


class _Backoff(ExponentialWithJitterBackoff):
    """A backoff that does not overflow.

    redis-py computes base · 2**failures, which overflows a float after 1024 failures. An outage of some minutes causes
    as many failures.
    """

    def compute(self, failures: int) -> float:
        return super().compute(min(failures, MAX_DOUBLINGS))


def _backoff() -> _Backoff:
    return _Backoff(cap=MAX_BACKOFF_S, base=FIRST_BACKOFF_S)
