"""Checks of what a server has around its engine: files of settings, port, data directory, store, upstream."""

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.upstream.connect import connect as connect_upstream
from gateway.files.local_storage import PRIVATE_DIR
from gateway.files.object_storage import open_storage
from gateway.files.storage import BATCHES, ContentLost, Storage, StorageUnreachable
from gateway.http.server.tls import load_certificate
from gateway.keys.file import read_entries
from scheduler.config import TierConfigError, TierSet, load_tiers
from scheduler.store import connection
from scheduler.store.durability import TOO_FEW_REPLICAS, durable, wait_for_replicas
from scheduler.store.errors import NotDurable
from scheduler.store.keys import Keys
from tidegate.doctor.machine import Finding, error, warning
from tidegate.settings.commands import ServeSettings
from tidegate.supervision.process import listen
from tidegate.valkey import EmbeddedValkey, ValkeyError, running_valkey
from tidegate.worker.engine_worker import upstream_config

STORE_LIMIT_S, UPSTREAM_LIMIT_S = 10.0, 10.0  # seconds for all answers; a store's disk and replicas have 5 of them
SLOW_STORE_S = 0.005  # seconds of a round trip: each token waits for one
MAX_CLOCK_DIFFERENCE_S = 1.0  # between the store's clock and ours: deadlines are times of the gateways' clocks
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
MIB = 1 << 20


def check_tiers(settings: ServeSettings) -> Iterator[Finding]:
    tiers = load_tiers(settings.tiers_path)
    yield Finding("tiers", f"{settings.tiers_path}: {', '.join(tier.name for tier in tiers.by_priority)}")


def check_keys(settings: ServeSettings) -> Iterator[Finding]:
    """Check the keys file, or whether the server needs one."""
    if settings.api_keys is not None:
        secrets_of_file = read_entries(settings.api_keys, _tiers_of_keys(settings))
        if secrets_of_file or settings.api_key is not None:
            yield Finding("keys", f"{settings.api_keys}: {len(secrets_of_file)} secrets")
        else:
            remedy = f"make a key: `tidegate keys add NAME --file {settings.api_keys}`"
            yield warning("keys", f"{settings.api_keys} has no keys, and lets nobody in", remedy)
    elif settings.api_key is None and settings.host not in LOCAL_HOSTS:
        remedy = "make keys (`tidegate keys add NAME --file keys.yaml`) and use --api-keys keys.yaml"
        yield warning("keys", f"everybody who reaches {settings.host} may use the server", remedy)


def _tiers_of_keys(settings: ServeSettings) -> TierSet | None:
    """Return the tiers that keys may name, which are those of the first model; None if they cannot be read."""
    _, first = settings.workers()[0]
    try:
        return load_tiers(first.tiers_path)
    except TierConfigError:  # which is told about the tiers
        return None


def check_certificate(settings: ServeSettings) -> Iterator[Finding]:
    if load_certificate(settings.ssl_certfile, settings.ssl_keyfile) is not None:
        yield Finding("certificate", f"{settings.ssl_certfile}")


def check_port(settings: ServeSettings) -> Iterator[Finding]:
    with listen(settings.host, settings.port):
        yield Finding("port", f"{settings.host}:{settings.port} is free")


def check_data_dir(settings: ServeSettings) -> Iterator[Finding]:
    place = _existing_parent(settings.data_dir.absolute())
    free_mb = shutil.disk_usage(place).free // MIB
    text = f"{settings.data_dir}: {free_mb / 1024:.1f} GiB free on its disk"
    if free_mb <= settings.disk_reserve_mb:
        remedy = "free some space, or use another --data-dir or a smaller --disk-reserve-mb"
        yield error("data", f"{text}, and uploads must leave {settings.disk_reserve_mb} MB free", remedy)
    else:
        yield Finding("data", text)


def check_storage(settings: ServeSettings) -> Iterator[Finding]:
    """Write, read and remove a content in the storage of --files-url."""
    if settings.files_url is not None:
        with tempfile.TemporaryDirectory(prefix="tidegate-") as scratch:
            storage = open_storage(settings.files_url, Path(scratch))
            try:
                asyncio.run(_use_storage(storage))
            except (StorageUnreachable, ContentLost, OSError) as fault:
                yield error("storage", f"{settings.files_url}: {fault}", "correct --files-url, or its credentials")
            else:
                yield Finding("storage", f"{settings.files_url} can be written and read")


async def _use_storage(storage: Storage) -> None:
    name = f"{BATCHES}/doctor-{secrets.token_hex(8)}"
    (storage.directory / name).mkdir(PRIVATE_DIR, parents=True, exist_ok=True)
    try:
        await storage.append(f"{name}/content", 0, b"tide")
        await storage.fetch_appended(f"{name}/content", 4)
    finally:
        await storage.remove_folder(name)


def check_store(settings: ServeSettings) -> Iterator[Finding]:
    """Check the store that `serve` would use; an embedded one is started and ended."""
    if settings.redis_url:
        yield from asyncio.run(_inspect_store(settings.redis_url, settings))
        return
    try:
        with EmbeddedValkey(settings.data_dir) if settings.data_dir.exists() else contextlib.nullcontext():
            pass
    except ValkeyError as fault:
        yield error("store", str(fault))
        return
    with tempfile.TemporaryDirectory(prefix="tidegate-") as scratch, running_valkey(Path(scratch)) as url:
        yield from asyncio.run(_inspect_store(url, settings))


def check_upstream(settings: ServeSettings) -> Iterator[Finding]:
    if settings.engine == "openai":
        yield asyncio.run(_inspect_upstream(settings))


async def _inspect_store(url: str, settings: ServeSettings) -> list[Finding]:
    try:
        async with asyncio.timeout(STORE_LIMIT_S), connection.connect(url) as client:
            return [
                await _pace(client),
                *await _cluster(client),
                await _durability(client, settings.store_replicas),
                *await _memory(client, settings.store_mb),
                *await _clock(client),
            ]
    except (RedisError, OSError, ValueError) as fault:
        remedy = "start it, or correct --redis-url; without --redis-url, `serve` starts a store of its own"
        return [error("store", f"the store does not answer: {fault or 'no reply'}", remedy)]


async def _pace(client: Redis) -> Finding:
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        await client.ping()
        times.append(time.perf_counter() - begun)
    info = await client.info("server")
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    trip_s = sorted(times)[len(times) // 2]
    text = f"{name}, a round trip takes {1000 * trip_s:.2f} ms"
    if trip_s > SLOW_STORE_S:
        return warning("store", text, "put the store nearer to gateways and workers: each token waits for a round trip")
    return Finding("store", text)


async def _cluster(client: Redis) -> list[Finding]:
    """Say what a cluster means. Commands and scripts use several keys, which must have one slot."""
    if not (await client.info("cluster"))["cluster_enabled"]:
        return []
    prefix = Keys.of(client).prefix
    if not prefix.startswith("{"):
        remedy = "begin --redis-url with redis+cluster:// or rediss+cluster://"
        return [error("store", "it is a node of a cluster, but the URL is that of one server", remedy)]
    text = f"it is a cluster: the primary that has the slot of {prefix} serves this deployment, the others take no load"
    return [Finding("store", text)]


async def _durability(client: Redis, num_replicas: int) -> Finding:
    """Write as a gateway does before it acknowledges a file, and wait for disk and replicas."""
    wait_for_replicas(client, num_replicas)
    try:
        on_disk = await durable(client)
    except NotDurable as fault:
        if fault.cause != TOO_FEW_REPLICAS:
            raise
        connected = (await client.info("replication"))["connected_slaves"]
        text = f"it takes no files and batches with --store-replicas {num_replicas}: connected replicas: {connected}"
        return error("store", text, "let as many replicas follow it and keep up, or use a smaller --store-replicas")
    if on_disk:
        at_replicas = f", and at {num_replicas} of its replicas" if num_replicas else ""
        return Finding("store", f"what is acknowledged is on its disk{at_replicas}")
    text = "it cannot say what is on its disk: if it dies, files and batches may be lost"
    return warning("store", text, "use Valkey, or Redis 7.2 or newer, with `appendonly yes`")


async def _memory(client: Redis, store_mb: int) -> list[Finding]:
    """Compare the most memory that the store takes (0: no limit) with the budget, and look at what it does then."""
    info = await client.info("memory")
    most_mb, policy = info["maxmemory"] // MIB, info["maxmemory_policy"]
    found = []
    if 0 < most_mb <= store_mb:
        text = f"its maxmemory is {most_mb} MB, and --store-mb {store_mb}: bulk may fill it until it refuses chat, too"
        found.append(warning("store", text, "raise maxmemory well above --store-mb, or use a smaller --store-mb"))
    if policy != "noeviction":
        text = f"its maxmemory-policy is {policy}: once it is full, it removes requests, records of files and batches"
        found.append(warning("store", text, "set `maxmemory-policy noeviction`"))
    return found


async def _clock(client: Redis) -> list[Finding]:
    seconds, microseconds = await client.time()
    difference_s = abs(time.time() - (int(seconds) + int(microseconds) / 1e6))
    if difference_s <= MAX_CLOCK_DIFFERENCE_S:
        return []
    text = f"the store's clock and this machine's are {difference_s:.1f} s apart"
    return [warning("clock", text, "let NTP set the clocks of all machines, such as by chrony")]


async def _inspect_upstream(settings: ServeSettings) -> Finding:
    try:
        async with asyncio.timeout(UPSTREAM_LIMIT_S):
            upstream = await connect_upstream(upstream_config(settings))
    except TimeoutError:
        return error("upstream", f"{settings.upstream} does not answer", "start it, or correct --upstream")
    return Finding("upstream", f"{settings.upstream} answers as a server of the dialect {upstream.info.device}")


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
