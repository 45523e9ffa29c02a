"""Which URLs and addresses webhooks may call."""

from ipaddress import ip_address

import pytest

from gateway.keys.webhooks import TargetPolicy

PUBLIC, LOCAL, PRIVATE = TargetPolicy(), TargetPolicy(allow_loopback=True), TargetPolicy(allow_private=True)
NEVER = "0.0.0.0 224.0.0.1 255.255.255.255 :: ff02::1 240.0.0.1 ::ffff:0.0.0.0"


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e"])
def test_public_addresses_are_called_by_https_only(address: str) -> None:
    for policy in (PUBLIC, LOCAL, PRIVATE):
        assert policy.allows(ip_address(address), "https")
        assert not policy.allows(ip_address(address), "http")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"])
def test_loopback_addresses_have_a_permission_of_their_own(address: str) -> None:
    assert not PUBLIC.allows(ip_address(address), "https")
    assert LOCAL.allows(ip_address(address), "http") and PRIVATE.allows(ip_address(address), "http")


@pytest.mark.parametrize("address", NEVER.split())
def test_addresses_of_nobody_are_never_called(address: str) -> None:
    assert not any(policy.allows(ip_address(address), "https") for policy in (PUBLIC, LOCAL, PRIVATE))


@pytest.mark.parametrize(
    "address", ["fec0::1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "fd00::1", "fe80::1", "64:ff9b::a01:203"]
)
def test_addresses_of_a_network_of_ones_own_need_the_permission(address: str) -> None:
    assert not any(policy.allows(ip_address(address), "https") for policy in (PUBLIC, LOCAL))
    assert PRIVATE.allows(ip_address(address), "http")


@pytest.mark.parametrize(
    "address", ["192.0.0.8", "192.0.0.170", "192.88.99.1", "::ffff:192.0.0.8", "2002:c058:6301::1", "3fff::1", "5f00::"]
)
def test_addresses_of_protocols_and_examples_are_not_public(address: str) -> None:
    assert not any(policy.allows(ip_address(address), "https") for policy in (PUBLIC, LOCAL))


@pytest.mark.parametrize(
    "url",
    ["http://localhost:9/", "http://127.0.0.1/hook", "https://a.localhost/", "http://[::1]:8/x", "http://LOCALHOST./"],
)
def test_urls_of_this_machine(url: str) -> None:
    assert PUBLIC.fault(url) is not None and LOCAL.fault(url) is None and PRIVATE.fault(url) is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com/hook",
        "ftp://example.com/",
        "https://",
        "https:///hook",
        "https://user:pw@example.com/",
        "https://example.com:99999/",
        "https://example.com:0/",
        "https://[::1/",
        "https://exa mple.com/",
        "https://example.com/\r\nx: y",
        "https://exämple.com/",
        "https://example.com/" + "a" * 3000,
        "http://example.com/hook@\u2028",
        "file:///etc/passwd",
    ],
)
def test_what_is_no_url_is_refused_by_all(url: str) -> None:
    assert all(policy.fault(url) for policy in (PUBLIC, LOCAL, PRIVATE))
