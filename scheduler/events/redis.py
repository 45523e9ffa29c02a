"""An event channel through Redis: one stream per gateway, one entry per message.

The stream exists while its gateway lives: `open` creates it, `listen` refreshes its TTL, and publishers never create
it, so publishing to a gateway that is gone fails. A gateway that ends without `close` leaves its stream behind for a
while; its heartbeats, which `listen` sends, stop at once. A listener continues after the last entry that it has read,
so a dropped connection neither loses nor repeats messages. On another primary, it reads the stream from its beginning:
entries may have been lost, and by a clock that is behind, new ones may come before the last one that it has read. So
the messages of the last second may come twice. A gateway id must have only one listener.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.request import TokenEvent
from scheduler.store import connection, keys
from scheduler.store.errors import UNREADABLE
from scheduler.store.scripts import load_script

log = structlog.get_logger()

FIELD = b"m"  # the only field of an entry: the list of events as msgpack; the first entry of a stream has another field
READ_COUNT = 256  # maximum number of entries per read

T = TypeVar("T")


class RedisEventChannel:
    """An event channel through Redis. Implements `scheduler.events.base.EventChannel`."""

    def __init__(
        self,
        client: Redis,
        ttl_s: float = keys.EVENTS_TTL_S,
        heartbeat_s: float = keys.EVENTS_HEARTBEAT_S,
    ) -> None:
        self._client = client
        self._keys = keys.Keys.of(client)
        self._ttl_ms = int(ttl_s * 1000)
        self._heartbeat_s = heartbeat_s
        self._beat = load_script(client, "scheduler.events", "heartbeat")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[TokenEvent])
        self._last_ids: dict[str, bytes] = {}  # id of the last entry read, by gateway id
        self._replications: dict[str, bytes] = {}  # replication id of the store at the last heartbeat, by gateway id
        self._pending: set[asyncio.Task[Any]] = set()  # commands that listeners wait for
        self._closed = False

    async def publish(self, messages: Mapping[str, Sequence[TokenEvent]]) -> list[str]:
        pipeline = self._client.pipeline(transaction=False)
        for reply_to, events in messages.items():
            fields: Any = {FIELD: self._encoder.encode(events)}
            pipeline.xadd(self._keys.events + reply_to, fields, maxlen=keys.EVENTS_MAXLEN, nomkstream=True)
        return [reply_to for reply_to, entry in zip(messages, await pipeline.execute(), strict=True) if not entry]

    async def open(self, gateway_id: str) -> None:
        self._last_ids[gateway_id] = b"0"
        await self._heartbeat(self._client, gateway_id, opens=True)

    async def listen(self, gateway_id: str) -> AsyncIterator[list[TokenEvent]]:
        if gateway_id not in self._last_ids:
            raise RuntimeError(f"listen before open: {gateway_id}")
        reader = connection.blocking(self._client, self._heartbeat_s)
        loop = asyncio.get_running_loop()
        heartbeat_due_s = loop.time()
        try:
            while not self._closed:
                if loop.time() >= heartbeat_due_s:
                    await self._unless_closed(self._heartbeat(reader, gateway_id))
                    heartbeat_due_s = loop.time() + self._heartbeat_s
                left_s = heartbeat_due_s - loop.time()
                for entry_id, fields in await self._unless_closed(self._read(reader, gateway_id, left_s)) or ():
                    self._last_ids[gateway_id] = entry_id
                    if FIELD in fields and (events := self._events(fields[FIELD])):
                        yield events
        finally:
            await reader.aclose()

    def _events(self, message: bytes) -> list[TokenEvent]:
        """Return the events of a message; none if it cannot be read, which must not hold up the messages behind it."""
        try:
            return self._decoder.decode(message)
        except UNREADABLE as error:
            log.error("a message of token events cannot be read; it is skipped", reason=str(error))
            return []

    async def beats(self, gateway_ids: Sequence[str]) -> list[int | None]:
        values = await self._client.mget([self._keys.gateway_beat + i for i in gateway_ids]) if gateway_ids else []
        return [None if value is None else int(value) for value in values]

    async def close(self) -> None:
        """End the listeners and remove their streams, so that publishing to them fails at once."""
        self._closed = True
        for task in self._pending:
            task.cancel()
        prefixes = (self._keys.events, self._keys.gateway_beat)
        streams = [prefix + gateway_id for gateway_id in self._last_ids for prefix in prefixes]
        self._last_ids.clear()
        if streams:
            with contextlib.suppress(RedisError):  # if the store is unreachable, the TTL removes the streams
                await self._client.delete(*streams)

    async def _heartbeat(self, client: Redis, gateway_id: str, *, opens: bool = False) -> None:
        """Send a heartbeat, refresh the stream's TTL and remove the entries that were read.

        If the stream is gone, open a new one. The reason may be that this process was suspended or that the store was
        emptied. Publishing has failed since the stream disappeared.
        """
        names = [self._keys.events + gateway_id, self._keys.gateway_beat + gateway_id]
        known, last_id = self._replications.get(gateway_id, b""), self._last_ids[gateway_id]
        args: list[Any] = [self._ttl_ms, known, last_id, int(opens)]
        is_alive, replication = await self._beat(keys=names, args=args, client=client)
        if replication != known:
            self._replications[gateway_id], self._last_ids[gateway_id] = replication, b"0"
        if not is_alive:
            log.warning("the event stream had expired and is opened again", gateway_id=gateway_id)
            await self._heartbeat(client, gateway_id, opens=True)

    async def _read(self, reader: Redis, gateway_id: str, timeout_s: float) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return new entries with their ids. Wait for them for `timeout_s` at most."""
        stream, block_ms = self._keys.events + gateway_id, max(1, int(timeout_s * 1000))
        last_id = self._last_ids[gateway_id]
        reply: Any = await reader.xread({stream: last_id}, count=READ_COUNT, block=block_ms)
        entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1] if reply else []
        return entries

    async def _unless_closed(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`; None if `close` is called first.

        The reader sets no time limit, so `work` may wait for ever for a server that does not answer. `close` must not
        wait for `work`.
        """
        if self._closed:
            work.close()
            return None
        task = asyncio.create_task(work)
        self._pending.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            listener = asyncio.current_task()
            if self._closed and not (listener is not None and listener.cancelling()):
                return None
            raise
        finally:
            self._pending.discard(task)
