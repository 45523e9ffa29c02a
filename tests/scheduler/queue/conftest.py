from collections.abc import AsyncIterator

import pytest

from scheduler.store import connection
from tests.scheduler.queue.harness import Handles, ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "redis"])
async def handles(request: pytest.FixtureRequest, clock: ManualClock) -> AsyncIterator[Handles]:
    """Handles on an empty queue, in memory and in Redis."""
    if request.param == "memory":
        handles = Handles(clock)
        yield handles
        await handles.close()
        return
    client = connection.connect(request.getfixturevalue("valkey_url"))
    handles = Handles(clock, client)
    yield handles
    await handles.close()
    await client.aclose()
