from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.scheduler.drivers.calls.stand import Stand


@pytest.fixture
async def stand(redis_client: Redis) -> AsyncIterator[Stand]:
    stand = Stand(redis_client)
    yield stand
    await stand.close()
