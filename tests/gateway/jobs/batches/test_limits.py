"""How many batches of a key may be unfinished."""

import asyncio
from pathlib import Path

import openai
import pytest
from redis.asyncio import Redis

from gateway.jobs.batches.model import Batch
from gateway.jobs.batches.retry import retry_line
from tests.gateway.offline import OfflineGateway, jsonl, keyring, lines, running_gateway

KEYS = keyring(alice=None, bob=None)


async def refused(gateway: OfflineGateway) -> openai.RateLimitError:
    file_id = await gateway.upload(jsonl(lines(1)))
    with pytest.raises(openai.RateLimitError) as error:
        await gateway.create(file_id)
    return error.value


async def test_a_key_has_a_limited_number_of_unfinished_batches(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path, keys=KEYS, batch_max_unfinished=2) as gateway:
        alice, permits = gateway.as_key("alice"), asyncio.Semaphore(0)
        gateway.completions.permits = permits
        first, second = [await alice.submit(lines(1)) for _ in range(2)]

        error = await refused(alice)
        assert error.code == "rate_limit_exceeded" and int(error.response.headers["retry-after"]) > 0
        assert "2 batches" in error.message and "/cancel" in error.message
        folders = {folder.name for folder in (tmp_path / "batches").iterdir()}
        assert folders == {first.id, second.id}, "nothing of a refused batch is left"
        assert len((await alice.client.batches.list()).data) == 2

        await gateway.as_key("bob").submit(lines(1))
        await alice.client.batches.cancel(first.id)
        await alice.ended(first.id)
        await alice.submit(lines(1))
        await refused(alice)


async def test_batches_that_come_at_the_same_time_do_not_exceed_the_limit(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path, batch_max_unfinished=3) as gateway:
        gateway.completions.permits = asyncio.Semaphore(0)
        file_id = await gateway.upload(jsonl(lines(1)))
        outcomes = await asyncio.gather(*(gateway.create(file_id) for _ in range(9)), return_exceptions=True)
        assert sum(isinstance(outcome, openai.RateLimitError) for outcome in outcomes) == 6


async def test_an_operator_may_retry_a_line_of_a_key_with_too_many_batches(redis_client: Redis, tmp_path: Path) -> None:
    async with running_gateway(redis_client, tmp_path, batch_max_unfinished=1) as gateway:
        gateway.completions.permits = asyncio.Semaphore(0)
        batch = await gateway.submit(lines(2))
        await refused(gateway)
        retried = await retry_line(gateway.batches, gateway.files, batch.id, 2, None, "retried")
        assert isinstance(retried, Batch)
