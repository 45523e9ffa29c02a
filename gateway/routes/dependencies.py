"""Dependencies of the routes: who is calling, and who may use /admin. Both are decided before a body is read.

With configured keys, a request needs a known key, and /admin needs one with `admin: true`.

Without configured keys, /v1 is open to every program that reaches the port, but not to web pages of other origins:
a browser lets any page post text/plain or a form to 127.0.0.1. Browsers name the page's origin in the `Origin`
header, and programs send none. A proxy has to pass `Host` on as the client wrote it, because `Origin` is compared
with it. /admin is then open only to programs on this machine: the peer's address is a loopback address, and so is
the name by which the client called the server. The second condition keeps out web pages whose host name was made
to resolve to 127.0.0.1 (DNS rebinding).
"""

from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

import structlog
from fastapi import Depends, Request

from gateway.identity import ApiKey
from gateway.protocol.errors import ApiError, foreign_origin
from gateway.state import gateway_of


async def authenticated(request: Request) -> ApiKey | None:
    """Return the caller's key, or None if no keys are configured. Raises `ApiError` 401 or 403."""
    keyring = gateway_of(request).keyring
    if keyring.is_open and _is_cross_site(request.headers.get("origin"), request.headers.get("host", "")):
        raise foreign_origin()
    key = keyring.authenticate(request.headers.get("authorization"))
    if key is not None:
        structlog.contextvars.bind_contextvars(key=key.name)
    return key


Caller = Annotated[ApiKey | None, Depends(authenticated)]


async def administrator(request: Request, key: Caller) -> None:
    """Raises `ApiError` 403 if the caller may not use /admin."""
    if key is not None and not key.admin:
        message = "This API key may not administrate: that takes `admin: true` in the keys file."
        raise ApiError(403, message, code="insufficient_permissions")
    if key is None and not _is_local(request):
        message = "Without API keys, administration is open to programs on the server's own machine only."
        raise ApiError(403, message, code="insufficient_permissions")


Administrator = Depends(administrator)


def _is_cross_site(origin: str | None, host: str) -> bool:
    """Whether a web page of another origin sent the request. A sandboxed page's origin is `null`, which counts."""
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:
        return True


def _is_local(request: Request) -> bool:
    if request.client is None or not _is_loopback(request.client.host):
        return False
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
