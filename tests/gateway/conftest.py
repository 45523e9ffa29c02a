import pytest

from tests.gateway.stand import use_store


@pytest.fixture(scope="session", autouse=True)
def _store_of_stands(valkey_server: str) -> None:
    use_store(valkey_server)
