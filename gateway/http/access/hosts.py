"""The `Host` header: what a valid one is, and the names by which clients may call a server without API keys.

Does not know HTTP servers, so that workers and the supervisor import no web framework; the middleware is in
gateway/http/access/host_check.py.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

MAX_HOST = 300  # characters of a `Host` header: DNS names have at most 253
# A name or an address, and a port (RFC 3986, section 3.2.2): no user name, no path, no blank.
HOST = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?", re.ASCII)
MAX_CACHED = 256  # answers for the host names of recent requests, because parsing one takes longer than all else here


class AllowedHosts:
    """The allowed host names: those of this machine, the address that the server listens on, and `entries`.

    An entry is a name, `*.example.com` for all names below example.com, or `*` for all names. If the server does not
    only listen on a loopback address, every IP address is allowed too: no attacker's name server can answer for it.
    """

    def __init__(self, entries: Sequence[str] = (), bound: str = "127.0.0.1") -> None:
        names = [entry.lower().rstrip(".") for entry in (*entries, bound)]
        self._any = "*" in entries
        self._names = {"localhost", *names}
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        listens_on = address_of(bound)
        self._cached = lru_cache(MAX_CACHED)(self._allows)
        self._any_address = bound != "localhost" and (listens_on is None or not listens_on.is_loopback)

    def allows(self, host: str) -> bool:
        """Whether the `Host` header `host` is allowed. Browsers always send one, so a missing one is allowed."""
        return len(host) <= MAX_HOST and self._cached(host)

    def _allows(self, host: str) -> bool:
        if self._any or not host:
            return True
        name = host_name(host)
        address = address_of(name)
        if address is not None:
            return self._any_address or address.is_loopback or name in self._names
        return name in self._names or name.endswith(self._suffixes)


def is_one_host(hosts: Sequence[str]) -> bool:
    """Return whether these are the `Host` headers of a valid request: one, and well-formed."""
    return len(hosts) == 1 and HOST.fullmatch(hosts[0]) is not None


def host_name(host: str) -> str:
    """Return the name in a `Host` header in lower case, without the port. Return "?" if there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "?").rstrip(".")
    except ValueError:
        return "?"


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    """Return `name` as an IP address; None if it is not one. An IPv4 address in IPv6 form becomes an IPv4 address."""
    try:
        address = ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
