"""A key sees only its own batches, and creates them only if it may use the batch tier."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from redis.asyncio import Redis

from tests.gateway.offline import TIERS, OfflineGateway, keyring, lines, running_gateway

KEYS = keyring(alice=None, bob=frozenset({TIERS.batch_tier}), chat=frozenset({TIERS.default_tier}))


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    async with running_gateway(redis_client, tmp_path, keys=KEYS) as gateway:
        yield gateway


async def test_a_batch_and_its_files_are_unknown_to_every_other_key(gateway: OfflineGateway) -> None:
    alice, bob = gateway.as_key("alice"), gateway.as_key("bob")
    gateway.completions.statuses["q1"] = [400]
    batch = await alice.ended((await alice.submit(lines(2))).id)
    assert batch.status == "completed"
    assert gateway.completions.owners == {"alice"}
    for ask in (bob.client.batches.retrieve, bob.client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await ask(batch.id)
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        with pytest.raises(openai.NotFoundError):
            await bob.client.files.content(file_id)
        assert (await alice.client.files.content(file_id)).text
    with pytest.raises(openai.BadRequestError, match="No such File"):
        await bob.create(batch.input_file_id)


async def test_a_key_without_the_batch_tier_creates_no_batches(gateway: OfflineGateway) -> None:
    chat = gateway.as_key("chat")
    with pytest.raises(openai.PermissionDeniedError) as denied:
        await chat.submit(lines(1))
    assert denied.value.code == "insufficient_permissions" and TIERS.batch_tier in str(denied.value)
    assert [b async for b in chat.client.batches.list()] == []
    assert (await gateway.as_key("bob").submit(lines(1))).status == "validating"
