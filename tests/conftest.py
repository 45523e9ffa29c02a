"""Fixtures for all tests: one real embedded Valkey, emptied for each test that uses it; and the profiles of properties.

Properties try the same few examples in each run. With TIDEGATE_TEST_PROFILE=full they try new ones, and more of them. A
property whose examples are costly takes a share: `settings(max_examples=settings().max_examples // 4)`.
"""

import gc
import os
import sys
from collections.abc import AsyncIterator, Iterator
from functools import cache

import pytest
import redis as sync_redis
import redis.utils
import structlog
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis

from scheduler.store import connection
from scheduler.store.keys import Keys
from tidegate.valkey import running_valkey

# Plain lines: the default of structlog draws tracebacks with all their variables, for seconds.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.format_exc_info,
        structlog.processors.KeyValueRenderer(),
    ],
    logger_factory=lambda *args: structlog.PrintLogger(sys.stderr),  # what commands print goes to stdout
)

OFF = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]  # properties empty the store themselves
settings.register_profile("usual", deadline=None, suppress_health_check=OFF, derandomize=True, max_examples=40)
settings.register_profile("full", deadline=None, suppress_health_check=OFF, derandomize=False, max_examples=200)
settings.load_profile(os.environ.get("TIDEGATE_TEST_PROFILE", "usual"))

redis.utils.get_lib_version = cache(redis.utils.get_lib_version)  # each new connection reads the package's metadata

KEYS = Keys()
PERMANENT_KEYS = {KEYS.sequence, KEYS.epoch, KEYS.durable, KEYS.probe}


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections, which would take milliseconds each."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let libraries find their objects at exit: triton's bindings would name hundreds as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def valkey_url(valkey_server: str) -> str:
    """The URL of an empty store."""
    with sync_redis.Redis.from_url(valkey_server) as client:
        client.flushall()
    return valkey_server


@pytest.fixture
async def redis_client(valkey_url: str) -> AsyncIterator[Redis]:
    client = connection.connect(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def no_leaked_keys(valkey_url: str) -> Iterator[None]:
    """Fail a test that leaves keys in the store, except last claims and those that keys.py documents as permanent."""
    yield
    with sync_redis.Redis.from_url(valkey_url) as client:
        found = (key.decode() for key in client.keys("*"))
        left = {key for key in found if not key.startswith(KEYS.claim)}
    assert left <= PERMANENT_KEYS, f"keys left behind: {sorted(left - PERMANENT_KEYS)}"
