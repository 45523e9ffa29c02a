from collections.abc import AsyncIterator

import pytest

from tests.gateway.jobs.webhooks.receiver import Receiver, receiving
from tests.gateway.stand import use_store
from tests.stores import Store


@pytest.fixture(scope="session", autouse=True)
def _store_of_stands(valkey_server: Store) -> None:
    use_store(valkey_server.url)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """A receiver of webhooks."""
    async with receiving() as receiver:
        yield receiver
