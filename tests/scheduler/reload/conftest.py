"""Fixtures of tests of tiers that change at run time."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.scheduler.reload.parts import Part, Start, document, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiers.yaml", document(chat=1, bulk=2))


@pytest.fixture
async def start(redis_client: Redis, path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_part(name: str, own: Path = path, **depths: int) -> Part:
            part = Part(redis_client, name, own, depths)
            await stack.enter_async_context(part.follower)
            return part

        yield start_part
