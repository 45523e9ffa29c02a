"""The limit of a key's enqueued prompt tokens, on a real store: over all gateways, free when a batch is over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.gateway.offline import OfflineGateway, limited_keyring, line, running_gateway
from tests.waiting import until

LIMIT = 10
KEYS = limited_keyring(small={"batch_enqueued_tokens": LIMIT}, other={"batch_enqueued_tokens": LIMIT}, free={})


@pytest.fixture
async def gateway(redis_client: Redis, tmp_path: Path) -> AsyncIterator[OfflineGateway]:
    async with running_gateway(redis_client, tmp_path, keys=KEYS) as gateway:
        gateway.completions.permits = asyncio.Semaphore(0)
        yield gateway
        gateway.completions.permits.release()


def words(count: int) -> dict[str, Any]:
    """Return a line whose prompt has `count` tokens, with its role as one of them."""
    messages = [{"role": "user", "content": "a " * (count - 1)}]
    return line(f"{count} words", body={"model": "tide-1", "messages": messages})


async def status_of(gateway: OfflineGateway, batch_id: str) -> str:
    """Return the status of a batch after its input was checked."""
    async with asyncio.timeout(30):
        while (status := (await gateway.client.batches.retrieve(batch_id)).status) == "validating":
            await asyncio.sleep(0.005)
    return status


async def test_a_batch_beyond_the_limit_fails_as_openais_does(gateway: OfflineGateway) -> None:
    small = gateway.as_key("small")
    first = await small.submit([words(6)])
    assert await status_of(small, first.id) == "in_progress"

    batch = await small.ended((await small.submit([words(5)])).id)

    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.code, error.line, error.param) == ("token_limit_exceeded", None, None)
    assert error.message == (
        "Enqueued token limit reached for the API key 'small'. Limit: 10 enqueued tokens; its unfinished batches have "
        "6, and this one has 5. Please try again once some in_progress batches have been completed."
    )
    assert gateway.completions.calls == {words(6)["body"]["messages"][-1]["content"]: 1}


@pytest.mark.parametrize("end", ["completed", "cancelled"])
async def test_tokens_are_free_again_when_a_batch_is_over(gateway: OfflineGateway, end: str) -> None:
    small, permits = gateway.as_key("small"), gateway.completions.permits
    assert permits is not None
    first = await small.submit([words(LIMIT)])
    assert await status_of(small, first.id) == "in_progress"
    if end == "cancelled":
        await small.client.batches.cancel(first.id)
    else:
        permits.release()
    assert (await small.ended(first.id)).status == end
    assert await status_of(small, (await small.submit([words(LIMIT)])).id) == "in_progress"


async def test_a_failed_batch_takes_no_tokens(gateway: OfflineGateway) -> None:
    small = gateway.as_key("small")
    for _ in range(3):
        assert (await small.ended((await small.submit([words(LIMIT + 1)])).id)).status == "failed"
        assert (await small.ended((await small.submit([words(LIMIT), b"{"])).id)).status == "failed"
    assert await status_of(small, (await small.submit([words(LIMIT)])).id) == "in_progress"


async def test_a_key_has_no_more_lines_in_flight_than_its_limit(redis_client: Redis, tmp_path: Path) -> None:
    keys = limited_keyring(narrow={"batch_concurrent_lines": 2})
    async with running_gateway(redis_client, tmp_path, keys=keys) as gateway:
        narrow = gateway.as_key("narrow")
        permits = gateway.completions.permits = asyncio.Semaphore(0)
        batches = [await narrow.submit([words(n) for n in range(2, 6)]) for _ in range(2)]
        await until(lambda: gateway.completions.running == 2)
        for _ in range(8):
            permits.release()
        for batch in batches:
            assert (await narrow.ended(batch.id)).status == "completed"
        assert gateway.completions.peak == 2
