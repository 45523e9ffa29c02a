"""Addresses of stores: URLs with users, passwords from elsewhere, and TLS."""

import ssl
import sys
from pathlib import Path

import pytest
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import AuthenticationError

from scheduler.store import address, connection
from scheduler.store.keys import Keys
from scheduler.store.route import ClusterGuide, SentinelGuide
from tests.scheduler.store.nodes import embedded_server


def test_a_url_of_sentinels_names_service_database_users_and_tls() -> None:
    settings, route = address.parse(
        "rediss+sentinel://tide:se%40same@s1:26380,s2,[::1]:5/main/3?ssl_ca_certs=/ca.pem&sentinel_password=s3cret"
    )
    assert (settings["username"], settings["password"], settings["db"]) == ("tide", "se@same", 3)
    assert settings["connection_class"] is SSLConnection
    assert settings["ssl_ca_certs"] == "/ca.pem"
    guides = [guide for guide in route.guides if isinstance(guide, SentinelGuide)]
    assert {guide.service for guide in guides} == {"main"}
    asked = [guide.sentinel.sentinels[0].connection_pool for guide in guides]
    assert [(p.connection_kwargs["host"], p.connection_kwargs["port"]) for p in asked] == [
        ("s1", 26380),
        ("s2", 26379),
        ("::1", 5),
    ]
    for pool in asked:
        made = pool.make_connection()
        assert isinstance(made, SSLConnection)
        assert made.ssl_context.cert_reqs is ssl.CERT_REQUIRED
        assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
        assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == (None, "s3cret")


def test_a_url_of_a_cluster_names_nodes_users_and_tls() -> None:
    settings, route = address.parse("rediss+cluster://tide:s3cret@n1:7000,n2?ssl_ca_certs=/ca.pem")
    pools = [guide.pool for guide in route.guides if isinstance(guide, ClusterGuide)]
    places = [(pool.connection_kwargs["host"], pool.connection_kwargs["port"]) for pool in pools]
    assert places == [("n1", 7000), ("n2", 6379)]
    for pool in pools:
        assert isinstance(pool.make_connection(), SSLConnection)
        asked, used = pool.connection_kwargs, settings
        for name in ("username", "password", "ssl_ca_certs"):
            assert asked[name] == used[name]


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("redis://s1", "tidegate:leases"),
        ("redis+cluster://s1", "{tidegate}:leases"),
        ("redis+sentinel://s1/main?deployment=blue", "blue:leases"),
        ("redis+cluster://s1?deployment=blue", "{blue}:leases"),
    ],
)
def test_the_url_says_what_keys_begin_with(url: str, key: str) -> None:
    assert Keys.of(connection.connect(url)).leases == key


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://s1",
        "redis+sentinel://s1,:5/main",
        "redis+cluster://s1/1",
        "redis+cluster://s1,:5",
        "redis://s1?deployment=a%27b",
        "redis://:a@s1?password_file=/b",
        "redis://s1?password_file=/b&password_command=c",
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        connection.connect(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://s1?pasword_file=/a", "'pasword_file' is no option of a store's URL; is 'password_file' meant?"),
        ("rediss+sentinel://s1/main?ssl_ca_cert=/a", "is 'ssl_ca_certs' meant?"),
        ("unix:///a?zebra=1", "'zebra' is no option of a store's URL$"),
        ("redis://s1?sentinel_username=a", "no option"),
        ("redis://s1/prod", r"'prod' is no number of a database.*\?deployment=NAME"),
        ("redis+sentinel://s1/main/prod", "no number of a database"),
    ],
)
def test_a_mistake_in_a_url_is_named_with_a_way_out(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        connection.connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "rediss://s1/3?ssl_ca_certs=/a&ssl_check_hostname=false&socket_timeout=2&max_connections=9",
        "redis://s1/0/",
        "redis://s1/?db=1&deployment=blue&model=a",
        "unix:///run/prod/valkey.sock?db=2",
        "redis+sentinel://a:b@s1/main/2?sentinel_username=c&sentinel_password=d",
        "rediss+cluster://s1,s2?ssl_certfile=/a&ssl_keyfile=/b",
    ],
)
def test_redis_pys_options_are_those_of_the_url(url: str) -> None:
    connection.connect(url)


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:1/main", "redis+cluster://127.0.0.1:1"])
async def test_where_nobody_names_the_primary_the_reason_of_the_last_one_asked_is_said(url: str) -> None:
    _, route = address.parse(url)
    with pytest.raises(MasterNotFoundError, match=r"knows the primary\. .*(127\.0\.0\.1|No master found)"):
        await route.primary()


async def test_a_password_that_changes_is_read_for_each_new_connection(tmp_path: Path) -> None:
    file = tmp_path / "password"
    with embedded_server(tmp_path / "store") as server:
        await server.start()
        for user in ("tide", "other"):
            server.ask("ACL", "SETUSER", user, "on", ">first", "~*", "+@all")
        sources = (f"password_file={file}", f"password_command={sys.executable}%20-m%20base64%20-d%20{file}.b64")
        for user, source in zip(("tide", "other"), sources, strict=True):
            client = connection.connect(f"unix://{user}@{server.valkey.socket_path}?{source}")
            file.write_text("first\n")
            file.with_suffix(".b64").write_text("Zmlyc3Q=")
            assert await client.acl_whoami() == user
            server.ask("ACL", "SETUSER", user, "<first", ">second")
            server.ask("CLIENT", "KILL", "USER", user)
            file.write_text("second\n")
            file.with_suffix(".b64").write_text("c2Vjb25k")
            assert await client.acl_whoami() == user
            await client.aclose()


def test_a_password_that_cannot_be_read_is_named() -> None:
    for source in ("password_file=/nowhere", "password_command=false"):
        settings, _ = address.parse(f"redis://tide@store?{source}")
        with pytest.raises(AuthenticationError, match="the store's password cannot be read"):
            settings["credential_provider"].get_credentials()
