from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.system.server import Server, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as they found it; a part that they kill is started again."""
    with running(tmp_path_factory.mktemp("serve")) as running_server:
        running_server.wait_until_ready()
        yield running_server


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    server.wait_until_ready()
    async with AsyncOpenAI(base_url=server.base_url, api_key="test", max_retries=0, timeout=60) as openai_client:
        yield openai_client
