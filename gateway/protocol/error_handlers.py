"""Answer every expected error of an application with the error object of the client's API."""

from collections.abc import Sequence

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from gateway.files.disk import DiskFull
from gateway.files.storage import StorageUnreachable
from gateway.files.store import QuotaExceeded
from gateway.protocol.bodies.validation import first_fault
from gateway.protocol.error_shapes import error_body
from gateway.protocol.errors import ApiError, disk_full, files_quota_exceeded, invalid_request, store_failed
from gateway.protocol.unknown_paths import unknown_url
from scheduler.store.errors import STORE_AWAY

log = structlog.get_logger(__name__)


def from_http_exception(request: Request, error: HTTPException, routes: Sequence[BaseRoute]) -> ApiError:
    """Return the error for a request that Starlette itself refused, such as an unknown path or a wrong method.

    The `Allow` header names the methods of all `routes` with the requested path: of those with this very path, if there
    are any, and not of those in which a part of it is a parameter. Starlette's own header names only the methods of the
    first route.
    """
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return unknown_url(where, request.scope["path"], routes)
    if error.status_code == 405 and request.headers.get("upgrade", "").lower() == "websocket":
        message = "There is no WebSocket here. POST the request with 'stream', and read server-sent events."
        return ApiError(426, message, code="websocket_not_supported", headers={"upgrade": "HTTP/1.1"})
    if error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path[:200]}."
        fitting = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        same_path = [r for r in fitting if getattr(r, "path", "") == request.scope["path"]] or fitting
        methods = {method for route in same_path for method in getattr(route, "methods", ())}
        headers = {"allow": ", ".join(sorted(methods))} if methods else error.headers
        return ApiError(405, message, code="method_not_supported", headers=headers)
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return ApiError(error.status_code, str(error.detail), kind, headers=error.headers)


# Errors of whatever answers a request that are answers themselves.
EXPECTED = (ApiError, DiskFull, QuotaExceeded, *STORE_AWAY)


def as_api_error(error: Exception) -> ApiError:
    """Return the answer to one of the `EXPECTED` errors."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DiskFull):
        return disk_full()
    if isinstance(error, QuotaExceeded):
        return files_quota_exceeded(error.used_bytes, error.quota_bytes)
    return store_failed(error)


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    return JSONResponse(error_body(error, scope), status_code=error.status, headers=error.headers)


def install(app: FastAPI, routes: Sequence[BaseRoute] = ()) -> None:
    """Make `app` answer every expected error with the handlers of this module.

    gateway/http/middleware.py answers unexpected errors.
    """

    async def on_expected(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, StorageUnreachable):
            log.warning(str(error))
        return error_response(as_api_error(error), request.scope)

    async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        fault = first_fault(error.errors(), skip=("body", "query", "path", "header", "form"))
        return error_response(invalid_request(fault.message, fault.param, fault.code), request.scope)

    async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(from_http_exception(request, error, routes), request.scope)

    for expected in EXPECTED:
        app.add_exception_handler(expected, on_expected)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
