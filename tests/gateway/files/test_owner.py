"""A key sees only the files that it made."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from redis.asyncio import Redis

from gateway.store_keys import GatewayKeys
from tests.gateway.offline import OfflineGateway, keyring, make_gateway

# Names of keys that would lead into another index if they were not quoted.
NAMES = ("alice", "bob", "alice:purpose:batch", "expiry", "größe %3A *")


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    gateway = make_gateway(redis_client, tmp_path, keys=keyring(**dict.fromkeys(NAMES)))
    yield gateway
    await gateway.http.aclose()


async def test_a_file_is_unknown_to_every_other_key(gateway: OfflineGateway) -> None:
    alice, bob = gateway.as_key("alice"), gateway.as_key("bob")
    file_id = await alice.upload(b"secret")
    for ask in (bob.client.files.retrieve, bob.client.files.content, bob.client.files.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            await ask(file_id)
        assert missing.value.param == "id"
    with pytest.raises(openai.BadRequestError):
        await bob.client.files.list(after=file_id)
    assert (await alice.client.files.content(file_id)).content == b"secret"


async def test_files_of_open_access_are_hidden_once_there_are_keys(redis_client: Redis, tmp_path: Path) -> None:
    opened = make_gateway(redis_client, tmp_path)
    file_id = await opened.upload(b"x")
    locked = make_gateway(redis_client, tmp_path, keys=keyring(alice=None)).as_key("alice")
    own = await locked.upload(b"y")
    with pytest.raises(openai.NotFoundError):
        await locked.client.files.retrieve(file_id)
    assert [f.id async for f in opened.client.files.list()] == [file_id]
    assert [f.id async for f in locked.client.files.list()] == [own]
    for gateway in (opened, locked):
        await gateway.http.aclose()


async def test_files_of_every_key_expire(gateway: OfflineGateway, redis_client: Redis) -> None:
    for name in NAMES:
        await gateway.as_key(name).upload(b"x")
    gateway.clock.shift_s = 31 * 86_400
    assert await gateway.files.sweep() == len(NAMES)
    left = {key.decode() for key in await redis_client.keys(f"{GatewayKeys.of(redis_client).prefix}file*")}
    assert {key for key in left if ":was_at:" not in key} == {GatewayKeys.of(redis_client).files_position}
