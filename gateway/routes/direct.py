"""The endpoints that generate answers, without FastAPI's search for their route and its dependencies.

Both would take a quarter of the gateway's time for a short answer. FastAPI has the same routes: it describes them, and
answers other methods of their paths. Knows ASGI; does not know bodies or answers.
"""

from collections.abc import Iterable

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.protocol.error_handlers import EXPECTED, as_api_error, error_response
from gateway.routes.dependencies import authenticated


class DirectEndpoints:
    """The middleware that answers POSTs of `routes`, whose functions take a request and its caller's key.

    It must be the innermost one, because no other middleware of the application sees these requests after it.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[APIRoute]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(scope["path"]) if is_post else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.endpoint(request, await authenticated(request))
            await response(scope, receive, send)
        except EXPECTED as error:
            if scope["state"].get("has_started"):
                raise
            await error_response(as_api_error(error), scope)(scope, receive, send)
