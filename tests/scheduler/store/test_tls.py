"""TLS to the store: Valkey behind a proxy that speaks it, because the shipped binary does not."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import trustme
from redis.exceptions import ConnectionError, TimeoutError

from scheduler.store import connection
from tests.scheduler.stalling_proxy import StallingProxy
from tests.system.server import free_port

AUTHORITY = trustme.CA()


@pytest.fixture
async def port(valkey_url: str) -> AsyncIterator[int]:
    """The port of a store with TLS, whose certificate is that of `localhost`."""
    context, port = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), free_port()
    AUTHORITY.issue_cert("localhost").configure_cert(context)
    async with StallingProxy(valkey_url, port, context).serving():
        yield port


def write_authority(path: Path, authority: trustme.CA = AUTHORITY) -> Path:
    authority.cert_pem.write_to_path(path)
    return path


async def test_commands_and_messages_pass_through_tls(port: int, tmp_path: Path) -> None:
    authority = write_authority(tmp_path / "ca.pem")
    async with connection.connect(f"rediss://localhost:{port}?ssl_ca_certs={authority}") as client:
        assert await client.set("key", "value")
        assert await client.get("key") == b"value"
        async with aclosing(connection.messages(client, "channel")) as messages, asyncio.timeout(30):
            assert (await anext(messages))["type"] == "subscribe"
            await client.publish("channel", "text")
            assert (await anext(messages))["data"] == b"text"


@pytest.mark.parametrize(
    ("host", "authority", "reason"),
    [
        ("localhost", trustme.CA(), "unable to get local issuer certificate.*needs .*ssl_ca_certs=FILE"),
        ("127.0.0.1", AUTHORITY, "IP address mismatch.*needs a name that its certificate has"),
    ],
)
async def test_a_certificate_that_is_not_trusted_is_named_with_the_way_out(
    port: int, tmp_path: Path, host: str, authority: trustme.CA, reason: str
) -> None:
    file = write_authority(tmp_path / "ca.pem", authority)
    async with connection.connect(f"rediss://{host}:{port}?ssl_ca_certs={file}") as client:
        with pytest.raises(ConnectionError, match=reason):
            await client.ping()


async def test_a_store_without_tls_is_named_with_the_way_out(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_S", 0.2)
    proxy, client = StallingProxy(valkey_url, port := free_port()), connection.connect(f"rediss://localhost:{port}")
    async with proxy.serving(), client:
        with pytest.raises(TimeoutError, match=r"has no TLS, its URL begins with redis in place of rediss"):
            await client.ping()
