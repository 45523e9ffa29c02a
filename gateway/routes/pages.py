"""The pages for browsers: the console at /, and /docs. API clients get JSON from `GET /` as always.

The console's page holds no data: it reads everything from the API, with the key that its user enters. The scripts and
styles of /docs are Swagger UI's, as the package fastapi-offline ships it. Both pages run under content security
policies that allow nothing of other servers.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles

from gateway import console as console_package
from gateway.routes import ops

CONSOLE = StaticFiles(directory=Path(console_package.__path__[0]) / "static")
# Scripts, styles and data come from this server only, none of them stands in the page, and no other page may frame it.
CONSOLE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
CONSOLE_HEADERS = {
    "cache-control": "no-cache",  # a browser asks each time, so that after an upgrade it never mixes two versions
    "content-security-policy": CONSOLE_POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
# Swagger UI sets styles of single elements, and has images in `data:` URLs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DOCS = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<link rel="icon" href="docs/favicon.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = "SwaggerUIBundle({url: 'openapi.json', dom_id: '#swagger-ui', deepLinking: true, validatorUrl: null});\n"

BY_ACCEPT = {"vary": "Accept"}  # for caches: the answer to `GET /` depends on this header

console = APIRouter(include_in_schema=False)
docs = APIRouter(include_in_schema=False)


@console.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    response: Response
    if "text/html" in request.headers.get("accept", "").lower():  # a browser: API clients do not name it
        response = await file(request, "index.html")
    else:
        summary: dict[str, Any] = await ops.root(request)
        response = JSONResponse(summary)
    response.headers.update(BY_ACCEPT)
    return response


@console.api_route("/console/{name:path}", methods=["GET", "HEAD"])
async def file(request: Request, name: str) -> Response:
    """Return a file of the console, or 304 if the client has it."""
    response = await CONSOLE.get_response(name, request.scope)
    response.headers.update(CONSOLE_HEADERS)
    return response


@docs.get("/docs")
async def docs_page(request: Request) -> HTMLResponse:
    headers = {"content-security-policy": POLICY}
    return HTMLResponse(DOCS.format(title=request.app.title), headers=headers)


@docs.get("/docs/start.js")
async def start() -> Response:
    return Response(START, media_type="text/javascript")


@cache
def _content(name: str) -> bytes:
    return (files("fastapi_offline") / "static" / name).read_bytes()


@docs.get("/docs/{name}")
def asset(name: str) -> Response:  # in a thread, because it reads a file
    if name not in ASSETS:
        raise HTTPException(404)
    return Response(_content(name), media_type=ASSETS[name], headers={"cache-control": "max-age=86400"})
