"""Which host names an open server answers to."""

import pytest

from gateway.http.access.hosts import AllowedHosts

LOOPBACK = ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:8000", "127.9.9.9", "[::1]", "[::1]:8000", ""]
FOREIGN = ["rebound.example", "localhost.example", "127.0.0.1.example", "gate", "[::1", "a b", ":80"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "gate.example"])
def test_names_of_this_machine_are_allowed_and_others_are_not(bound: str) -> None:
    allowed = AllowedHosts(bound=bound)
    assert [host for host in LOOPBACK if not allowed.allows(host)] == []
    assert [host for host in FOREIGN if allowed.allows(host)] == []


def test_entries_are_names_patterns_or_everything() -> None:
    allowed = AllowedHosts(["Gate", "*.example.com", "192.0.2.1"])
    assert all(allowed.allows(host) for host in ("gate:8000", "a.b.example.com", "192.0.2.1"))
    assert not any(allowed.allows(host) for host in ("example.com", "badexample.com", "gate.example", "192.0.2.2"))
    assert AllowedHosts(["*"]).allows("rebound.example")
    assert AllowedHosts(bound="gate.example").allows("gate.example:8000")
