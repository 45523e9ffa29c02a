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
import redis.utils
import structlog
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis

from scheduler.store import connection
from tests.stores import Store, running_store

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


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections, which would take milliseconds each."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let libraries find their objects at exit: triton's bindings would name hundreds as leaked."""
    gc.unfreeze()


KIND = os.environ.get("TIDEGATE_TEST_STORE", "server")


@pytest.fixture(scope="session", autouse=KIND != "server")  # others are started in a loop of their own, before tests'
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with running_store(KIND, tmp_path_factory.mktemp("valkey")) as store:
        yield store


@pytest.fixture
def valkey_url(valkey_server: Store) -> str:
    """The URL of an empty store."""
    valkey_server.empty()
    return valkey_server.url


@pytest.fixture
async def redis_client(valkey_url: str) -> AsyncIterator[Redis]:
    client = connection.connect(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def no_leaked_keys(valkey_server: Store, valkey_url: str) -> Iterator[None]:
    """Fail a test that leaves keys in the store, except last claims and those that keys.py documents as permanent."""
    yield
    keys = valkey_server.keys
    left = {key for key in valkey_server.stored() if not key.startswith(keys.claim)}
    left -= {keys.sequence, keys.epoch, keys.durable, keys.probe}
    assert not left, f"keys left behind: {sorted(left)}"
