"""Middleware that refuses new requests while the gateway drains, and answers requests that its end cuts off.

Without it, uvicorn would answer a request that it cancels with status 500.
"""

import asyncio
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.protocol.error_handlers import error_response
from gateway.protocol.errors import unavailable
from scheduler.client import rejection

API = "/v1/"  # paths that are refused; health, readiness and metrics are still answered


class RefuseWhileDraining:
    """While `is_draining()`, answer API requests with 503 and `connection: close`, so that clients go elsewhere."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._is_draining() and scope["path"].startswith(API):
            await _refuse(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if scope["state"].get("has_started") or not self._is_draining():
                raise
            await _refuse(scope, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    reason = rejection.draining()
    await error_response(unavailable(f"{reason.message} {reason.advice}"), scope)(scope, receive, closing)
