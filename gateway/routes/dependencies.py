"""The dependency of every /v1 route: who is calling. Answers 401 and 403 before a body is read.

Where keys are configured, a page in a browser cannot present one it does not know. Where access is open, any
page of the web could have its reader's browser post to 127.0.0.1: text/plain and forms are sent without asking
the server first. Browsers name the page's origin in such requests, so one that is not this server's own is
refused; programs send no `Origin` and pass. `Host` is compared as the client wrote it: a proxy has to keep it.
"""

from typing import Annotated
from urllib.parse import urlsplit

import structlog
from fastapi import Depends, Request

from gateway.identity import ApiKey
from gateway.protocol.errors import foreign_origin
from gateway.state import gateway_of


async def authenticated(request: Request) -> ApiKey | None:
    """The caller's key, None where access is open. Raises `ApiError` 401 or 403."""
    keyring = gateway_of(request).keyring
    if keyring.is_open and _is_cross_site(request.headers.get("origin"), request.headers.get("host", "")):
        raise foreign_origin()
    key = keyring.authenticate(request.headers.get("authorization"))
    if key is not None:
        structlog.contextvars.bind_contextvars(key=key.name)
    return key


def _is_cross_site(origin: str | None, host: str) -> bool:
    """`null`, a sandboxed page's origin, is nobody's own."""
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:
        return True


Caller = Annotated[ApiKey | None, Depends(authenticated)]
