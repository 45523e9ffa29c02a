from collections.abc import AsyncIterator

import pytest

from tests.gateway.jobs.webhooks.receiver import Receiver, receiving
from tests.gateway.stand import use_store


@pytest.fixture(scope="session", autouse=True)
def _store_of_stands(valkey_server: str) -> None:
    use_store(valkey_server)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A receiver of webhooks."""
    async with receiving() as receiver:
        yield receiver
