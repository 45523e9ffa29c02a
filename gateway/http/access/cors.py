"""CORS: which web pages of other origins may use the server, and what their browsers are told.

Knows origins and headers; does not know API keys. An origin is what a browser sends in the `Origin` header:
`https://chat.example`, `app://obsidian.md`, `chrome-extension://<id>`, or `null` for pages without an origin.
"""

import re
from collections.abc import Sequence

import structlog
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.protocol.errors import foreign_origin

log = structlog.get_logger(__name__)

METHODS = ("DELETE", "GET", "HEAD", "POST")
# The headers that scripts may read. `*` stands for all others; browsers before 2022 do not know it.
EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "openai-processing-ms",
    "openai-version",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-tidegate-cache",
    "x-tidegate-expected-s",
    "x-tidegate-ignored-parameters",
    "*",
)


class AllowedOrigins:
    """The origins of the web pages that may use the server.

    In an entry, `*` stands for any characters but a slash: `http://localhost:*`, `https://*.example.com`. The entry `*`
    allows every origin, also `null`.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        self.any = "*" in entries
        patterns = [re.escape(_origin(entry)).replace(r"\*", "[^/]*") for entry in entries]
        self._pattern = re.compile("|".join(patterns) or "(?!)")  # the latter matches nothing

    def allows(self, origin: str) -> bool:
        return self.any or self._pattern.fullmatch(origin.lower()) is not None


class Cors(CORSMiddleware):
    """The middleware that answers preflight requests, and adds the CORS headers to answers, errors and streams.

    A preflight request has no API key, so it is answered before the routes see it. Cookies and other credentials of a
    browser are never allowed: an API key in a header is not one of them.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedOrigins) -> None:
        super().__init__(
            app,
            allow_origins=("*",) if allowed.any else (),
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,  # a page of a public site may use a server in a private network
            expose_headers=EXPOSED_HEADERS,
        )
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked_by_page = scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"])
        # Without the header there is nothing to add, so the frames of a stream take the shorter way.
        await (super().__call__ if asked_by_page else self.app)(scope, receive, send)

    def is_allowed_origin(self, origin: str) -> bool:
        return self._allowed.allows(origin)

    def preflight_response(self, request_headers: Headers) -> Response:
        origin = request_headers["origin"]
        if self.is_allowed_origin(origin):
            return super().preflight_response(request_headers)
        log.info("preflight_refused", origin=origin[:200])
        refusal = foreign_origin(origin)
        return JSONResponse(refusal.body(), refusal.status)


def _origin(entry: str) -> str:
    """Return `entry` as browsers write origins: in lower case, without a slash at the end unless it is `scheme://`."""
    return entry.lower() if entry.endswith("://") else entry.lower().rstrip("/")
