"""The middleware that looks at the `Host` header.

Keeps out web pages whose host name was made to resolve to this server (DNS rebinding): to a browser, they are pages of
the server itself. Does not know the client's address.
"""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.access.hosts import AllowedHosts, is_one_host
from gateway.protocol.error_handlers import error_response
from gateway.protocol.errors import host_not_allowed, invalid_request


class HostCheck:
    """The middleware that refuses other host names with status 403 while `is_open()`.

    Requests without one valid `Host` header are refused with status 400, as RFC 9112 wants it: proxies and servers that
    read different names in one request can be played off against each other.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedHosts, is_open: Callable[[], bool]) -> None:
        self._app = app
        self._allowed = allowed
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host") or [""] * (scope["http_version"] == "1.0")
            if not is_one_host(hosts):
                message = "A request must have exactly one `Host` header, with a host name and perhaps a port."
                await error_response(invalid_request(message, code="invalid_http"), scope)(scope, receive, send)
                return
            if self._is_open() and not self._allowed.allows(hosts[0]):
                await error_response(host_not_allowed(hosts[0]), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
