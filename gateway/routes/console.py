"""The console: `GET /` for browsers, and the files that the page loads. API clients get JSON from `GET /` as always."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.console.page import PAGE, file_response, wants_page
from gateway.routes import ops

router = APIRouter(include_in_schema=False)
BY_ACCEPT = {"vary": "Accept"}  # for caches: the answer depends on this header


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    response: Response
    if wants_page(request.headers.get("accept", "")):
        response = await file_response(PAGE, request.scope)
    else:
        summary: dict[str, Any] = await ops.root(request)
        response = JSONResponse(summary)
    response.headers.update(BY_ACCEPT)
    return response


@router.api_route("/console/{name:path}", methods=["GET", "HEAD"])
async def file(request: Request, name: str) -> Response:
    return await file_response(name, request.scope)
