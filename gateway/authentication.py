"""The dependency of every /v1 route: who is calling. Answers 401 before a body is read."""

from typing import Annotated

import structlog
from fastapi import Depends, Request

from gateway.identity import ApiKey
from gateway.state import gateway_of


async def authenticated(request: Request) -> ApiKey | None:
    """The caller's key, None where access is open. Raises `ApiError` 401."""
    key = gateway_of(request).keyring.authenticate(request.headers.get("authorization"))
    if key is not None:
        structlog.contextvars.bind_contextvars(key=key.name)
    return key


Caller = Annotated[ApiKey | None, Depends(authenticated)]
