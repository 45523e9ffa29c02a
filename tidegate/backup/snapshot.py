"""All that a store holds of one deployment: read at one moment, and written into an empty store.

Keys of other deployments in the same store are neither read nor changed. What lives only as long as processes is left
out: heartbeats, streams of tokens, locks, and requests that wait or run, whose clients are gone by then. Lines of
batches are put again by the gateway that goes on with the batch. Cached answers and unfinished uploads, whose parts lie
on a gateway's disk, are left out as well. Tasks stay.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from gateway.files.store import StoredFile, content_name
from gateway.jobs.batches.input.lines import input_name
from gateway.store_keys import GatewayKeys
from scheduler.clock import SystemClock
from scheduler.store.keys import Keys, Namespace, TaskKeys

LOCK_S = 600.0  # seconds for a snapshot, and for the end of another one
PAUSE_S = 5.0  # seconds without a group of keys after which writes go on, as if the reader had died
READ_GROUP = 200  # keys for each round trip
WRITE_GROUP = 500  # keys for each round trip

_KEYS, _OURS, _TASKS = Keys(""), GatewayKeys(""), TaskKeys("tasks:")
_QUEUE = ("queue", "waiting", "request", "leases", "held", "alone")
_OF_PROCESSES = ("waiters", "claim", "sequence", "epoch")  # new numbers are greater: they begin at the clock
LEFT_OUT = (
    "model:",  # queues and workers of one of several models, which have the same kinds of keys as those of one model
    *(getattr(_KEYS, name) for name in (*_QUEUE, *_OF_PROCESSES)),
    *(getattr(_TASKS, name) for name in _OF_PROCESSES),
    *(_KEYS.events, _KEYS.gateway_beat, _KEYS.workers, _KEYS.beats, _KEYS.worker, _KEYS.start, _KEYS.starting),
    *(_KEYS.tiers_proposed, _KEYS.followers, _KEYS.follower, _KEYS.durable, _KEYS.probe),
    *(_OURS.storage, _OURS.storage_lock, _OURS.batch_owner(""), _OURS.uploads_pending, _OURS.upload("")),
    *(_OURS.cached, _OURS.cache_index, _OURS.cache_sizes, _OURS.usage_write("")),
)
_BEGINNINGS = tuple(name for name in LEFT_OUT if name.endswith(":"))


class Content(msgspec.Struct, frozen=True, omit_defaults=True):
    """A content of the storage that the store names. `bytes` is None where the store does not say."""

    name: str
    bytes: int | None = None
    sha256: str | None = None
    is_appended: bool = False


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A key without the deployment's prefix, its expiry in ms of Unix time (0: none), and its content as of DUMP."""

    key: str
    expires_ms: int
    dump: bytes


class Snapshot(msgspec.Struct, frozen=True):
    entries: list[Entry]
    contents: list[Content]


class BadSnapshot(Exception):
    """What was read may be of several moments."""


class BadEntry(Exception):
    """The store cannot read an entry of a backup."""


async def take_snapshot(client: Redis) -> Snapshot:
    """Return what the store holds of the client's deployment at one moment.

    Writes to the store wait meanwhile, also those of other deployments in it; reads do not. Raises the store's errors,
    such as that its user may not use CLIENT PAUSE, and `BadSnapshot` if the store was too slow to keep it still.
    """
    lock = client.lock(GatewayKeys.of(client).storage_lock, timeout=LOCK_S, blocking_timeout=LOCK_S)
    async with lock:  # a second snapshot at the same time would end the pause of the first one
        try:
            return await _read_all(client)
        finally:
            await client.client_unpause()


async def _read_all(client: Redis) -> Snapshot:
    found: dict[str, Entry] = {}
    named: dict[str, list[Content]] = {}
    prefix, clock = Namespace.of(client).prefix, SystemClock()
    cursor, group, paused_s = None, list[str](), clock.now()
    while cursor != 0 or group:
        began_s = clock.now()
        cursor, group, values = await _read_group(client, prefix, group, cursor)
        if clock.now() - paused_s > PAUSE_S:
            raise BadSnapshot("the store did not answer in time to be kept still: try again when it has less to do")
        paused_s = began_s
        for entry, contents in values:
            found[entry.key], named[entry.key] = entry, contents
    return Snapshot(list(found.values()), [content for contents in named.values() for content in contents])


async def _read_group(
    client: Redis, prefix: str, group: list[str], cursor: int | None
) -> tuple[int, list[str], list[tuple[Entry, list[Content]]]]:
    """Renew the pause, and read the keys of `group`. Return the next cursor, the next group, and what was read."""
    pipeline = client.pipeline(transaction=False)
    pipeline.client_pause(int(1000 * PAUSE_S), all=False)
    pipeline.time()
    for name in group:
        pipeline.pttl(prefix + name)
        pipeline.dump(prefix + name)
        _ask_for_contents(pipeline, prefix, name)
    if cursor != 0:
        pipeline.scan(cursor or 0, f"{prefix}*", READ_GROUP)
    _, (seconds, microseconds), *answers = await pipeline.execute()
    cursor, keys = answers.pop() if cursor != 0 else (0, [])
    now_ms, read = 1000 * int(seconds) + int(microseconds) // 1000, []
    for name, left_ms, dump, value in zip(group, answers[::3], answers[1::3], answers[2::3], strict=True):
        if dump is not None:  # it has not expired
            read.append((Entry(name, 0 if left_ms < 0 else now_ms + left_ms, dump), list(_contents(name, value))))
    names = [key.decode().removeprefix(prefix) for key in keys]
    return int(cursor), [name for name in names if not _is_left_out(name)], read


def _is_left_out(name: str) -> bool:
    return name in LEFT_OUT or name.startswith(_BEGINNINGS)


def _ask_for_contents(pipeline: Pipeline, prefix: str, name: str) -> None:
    """Ask for the contents of the storage that a key names; otherwise for anything small."""
    if name.startswith(_OURS.file("")):
        pipeline.get(prefix + name)
    elif name.startswith(_OURS.batch_results("")):
        pipeline.hgetall(prefix + name)
    elif name == _OURS.batches_unfinished:
        pipeline.smembers(prefix + name)
    else:
        pipeline.exists(prefix + name)


def _contents(name: str, value: Any) -> Iterator[Content]:
    if name.startswith(_OURS.file("")):
        file = msgspec.json.decode(value, type=StoredFile)
        yield Content(content_name(file.id), file.bytes, file.sha256)
    elif name.startswith(_OURS.batch_results("")):
        for content, size in value.items():
            yield Content(content.decode(), int(size), is_appended=True)
    elif name == _OURS.batches_unfinished:
        yield from (Content(input_name(member.decode())) for member in value)


async def stored_keys(client: Redis) -> AsyncIterator[list[bytes]]:
    """Yield the keys of the client's deployment, in groups."""
    pattern, cursor = f"{Namespace.of(client).prefix}*", 0
    while True:
        cursor, keys = await client.scan(cursor, pattern, 1000)
        yield [key.encode() if isinstance(key, str) else key for key in keys]
        if not int(cursor):
            return


async def is_empty(client: Redis) -> bool:
    """Return whether the store has nothing of the client's deployment that a snapshot would have."""
    prefix = Namespace.of(client).prefix
    async for keys in stored_keys(client):
        if not all(_is_left_out(key.decode().removeprefix(prefix)) for key in keys):
            return False
    return True


async def remove_all(client: Redis) -> None:
    """Remove all keys of the client's deployment."""
    async for keys in stored_keys(client):
        if keys:
            await client.unlink(*keys)


async def try_entry(client: Redis, entries: Sequence[Entry]) -> None:
    """Write an entry under another name, and remove it again. Raises `BadEntry` if the store cannot read it."""
    if entries:
        key = f"{Namespace.of(client).prefix}probe"
        await write_entries(client, [msgspec.structs.replace(entries[0], key="probe", expires_ms=0)])
        await client.delete(key)


async def write_entries(client: Redis, entries: Sequence[Entry]) -> None:
    """Write entries, whatever the store has under their keys. Those that have expired since are gone at once."""
    prefix = Namespace.of(client).prefix
    for first in range(0, len(entries), WRITE_GROUP):
        pipeline = client.pipeline(transaction=False)
        for entry in entries[first : first + WRITE_GROUP]:
            pipeline.restore(prefix + entry.key, entry.expires_ms, entry.dump, replace=True, absttl=True)
        try:
            await pipeline.execute()
        except ResponseError as error:
            raise BadEntry(f"{error}; restore into the same version of the store, or a newer one") from error
