"""The files of the console, and the policy under which a browser shows it.

Knows HTTP headers; does not know the gateway. The page holds no data: it reads everything from the API, with the key
that its user enters.
"""

from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGE = "index.html"
# Scripts, styles and data come from this server only, none of them stands in the page, and no other page may frame it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # a browser asks each time, so that after an upgrade it never mixes two versions
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
}

_FILES = StaticFiles(directory=Path(__file__).parent / "static")


def wants_page(accept: str) -> bool:
    """Return whether a client that sends this `Accept` header is a browser: API clients do not name text/html."""
    return "text/html" in accept.lower()


async def file_response(name: str, scope: Scope) -> Response:
    """Return a file of the console, or 304 if the client has it. Raises `HTTPException` 404 if there is none."""
    response = await _FILES.get_response(name, scope)
    response.headers.update(HEADERS)
    return response
