"""What a key says of webhooks: the secret that signs them, and which URLs they may call. Pure.

Signatures are those of OpenAI's clients and of the Standard Webhooks specification. The check of URLs is the defence
against requests that clients make this server send to its own network: a URL is checked when it is given, and the
address that its name has is checked each time before it is called. Whoever calls it must use that very address: the
name may have another one a moment later (DNS rebinding).
"""

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from gateway.http.access.hosts import address_of

Address = IPv4Address | IPv6Address

PREFIX = "whsec_"
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64  # as in the specification
MAX_URL = 2048  # characters
NAT64 = IPv6Network("64:ff9b::/96")  # addresses that stand for the IPv4 address in their last four bytes
# What `is_global` of Python 3.11 calls public, and the registries of IANA do not: addresses of protocols, relays of
# 6to4, and addresses for documentation.
NOT_PUBLIC = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """Which addresses may be called besides public ones. `allow_private` includes loopback addresses."""

    allow_loopback: bool = False
    allow_private: bool = False

    def fault(self, url: str) -> str | None:
        """Return a sentence about what is wrong with `url`; None if it may be called, as far as its text tells."""
        if fault := url_fault(url):
            return fault
        parts = urlsplit(url)
        literal = _literal(parts)
        if literal is not None and not self.allows(literal, parts.scheme):
            return self._refusal(parts.hostname or "")
        if parts.scheme == "http" and literal is None and not self.allow_private:
            return "It must begin with https://."
        return None

    def allows(self, address: Address, scheme: str) -> bool:
        """Whether `address` may be called. A public address is called by https only."""
        inner = _inner(address)
        if inner.is_loopback:
            return self.allow_loopback or self.allow_private
        if inner.is_multicast or inner.is_unspecified or inner.is_reserved:
            return False
        return scheme == "https" if _is_public(inner) else self.allow_private

    def _refusal(self, host: str) -> str:
        way_out = "the server must be started with --webhook-allow-private to call addresses of its own network."
        return f"The address {host[:100]} is not public, or not called by https: {way_out}"


def url_fault(url: str) -> str | None:
    """Return a sentence about what is wrong in `url`; None if it is an absolute URL without a password."""
    if len(url) > MAX_URL or not re.fullmatch(r"[!-~]+", url):
        return f"It must be a URL of at most {MAX_URL} ASCII characters, without blanks."
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not parts.hostname or parts.port == 0:
            return "It must be an absolute URL, such as https://example.com/hook."
    except ValueError:
        return "It must be an absolute URL, such as https://example.com/hook."
    return "It must have no user name and no password." if "@" in parts.netloc else None


def _literal(parts: SplitResult) -> Address | None:
    """Return the address that the URL has in place of a name; None if there is a name to be resolved."""
    host = (parts.hostname or "").rstrip(".")
    return ip_address("127.0.0.1") if host == "localhost" or host.endswith(".localhost") else address_of(host)


def _inner(address: Address) -> Address:
    """Return the IPv4 address inside an IPv6 address that only stands for it; else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or address


def _is_public(address: Address) -> bool:
    is_site_local = isinstance(address, IPv6Address) and address.is_site_local
    return address.is_global and not is_site_local and not any(address in network for network in NOT_PUBLIC)


def secret_bytes(secret: str) -> bytes:
    """Return the bytes of a secret `whsec_<base64>`. Raises `ValueError` without the secret if it is malformed."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"a secret of webhooks is {PREFIX} and the base64 of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} random "
            'bytes; make one with: echo "whsec_$(openssl rand -base64 32)"'
        )
    return key


def signed_headers(event_id: str, body: bytes, secret: str, now_s: int) -> dict[str, str]:
    """Return the headers that prove that `body` comes from who has the secret, at the time `now_s`."""
    signed = b".".join((event_id.encode(), str(now_s).encode(), body))
    digest = hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(now_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
