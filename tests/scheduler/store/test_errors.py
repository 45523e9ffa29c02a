"""A store that refuses writes: every kind of call raises `StoreRefused` with the cause, and reads go on."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ResponseError

from scheduler.store import connection
from scheduler.store.durability import durable
from scheduler.store.errors import CAUSES, NOT_PRIMARY, StoreRefused, refusal_of
from tests.refusals import CODES, limitable_valkey, refusing

SECRET = "a prompt that no message may repeat"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server whose files can be limited."""
    with limitable_valkey(tmp_path_factory.mktemp("store")) as url:
        yield url


@pytest.fixture
async def client(store: str) -> AsyncIterator[Redis]:
    client = connection.connect(store)
    yield client
    await client.aclose()


async def by_command(client: Redis) -> None:
    await client.set("key", SECRET)


async def by_pipeline(client: Redis) -> None:
    await client.pipeline(transaction=False).get("key").set("key", SECRET).execute()


async def by_transaction(client: Redis) -> None:
    await client.pipeline(transaction=True).set("key", SECRET).get("key").execute()


async def by_script(client: Redis) -> None:
    await client.register_script("return redis.call('SET', KEYS[1], ARGV[1])")(keys=["key"], args=[SECRET])


async def by_blocking_client(client: Redis) -> None:
    reader = connection.blocking(client, 1.0)
    try:
        await reader.set("key", SECRET)
    finally:
        await reader.aclose()


WRITES = (by_command, by_pipeline, by_transaction, by_script, by_blocking_client)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("code", sorted(set(CODES) - NOT_PRIMARY))  # those are in test_failover.py
async def test_every_refused_write_names_its_cause_and_reads_go_on(client: Redis, store: str, code: str) -> None:
    await client.set("key", "before")
    with refusing(store, code):
        for write in WRITES:
            with pytest.raises(StoreRefused) as refused:
                await write(client)
            assert refused.value.cause == CAUSES[code], write
            assert SECRET not in str(refused.value)
        with pytest.raises(StoreRefused):
            await durable(client)
        assert await client.get("key") == b"before"
    for write in WRITES:
        await write(client)
    assert await durable(client) is True


async def test_a_server_that_loads_its_data_is_asked_again_and_then_named() -> None:
    attempts = 0

    async def ask() -> None:
        nonlocal attempts
        attempts += 1
        raise BusyLoadingError("Valkey is loading the dataset in memory")

    async def disconnect(error: Exception) -> None:
        pass

    with pytest.raises(StoreRefused, match=CAUSES["LOADING"]):
        await connection._BoundedRetry(NoBackoff(), 2).call_with_retry(ask, disconnect)
    assert attempts == 3


def test_other_errors_are_not_refusals() -> None:
    """A text that only contains a code is not one: commands and their arguments are part of messages."""
    for text in ("WRONGTYPE Operation against a key", "ERR the value MISCONF is wrong", "MISCONFIGURED"):
        assert refusal_of(ResponseError(text)) is None
