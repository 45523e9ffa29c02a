from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.scheduler.store.nodes import Pair, server_pair


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """A primary and its replica, which run."""
    with server_pair(tmp_path) as pair:
        await pair.start()
        yield pair
