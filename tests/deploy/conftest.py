import pytest

from tests.gateway.stand import use_store
from tests.stores import Store


@pytest.fixture(scope="session", autouse=True)
def _store_of_stands(valkey_server: Store) -> None:
    use_store(valkey_server.url)
