"""The object in which a client reads an error: OpenAI's, or Anthropic's for clients of Anthropic's API.

Knows paths, headers and the names of both objects; does not know why a request failed.
"""

from typing import Any

from starlette.types import Scope

from gateway.protocol.errors import ApiError

ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_VERSION = "anthropic-version"  # the header that tells Anthropic's clients on paths that both APIs have
# Anthropic's error types by HTTP status. Its clients take a refusal for good or try again by the type, too.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is of Anthropic's API, by its path or by the header of Anthropic's clients."""
    path: str = scope["path"]
    if path == ANTHROPIC_PATHS or path.startswith(f"{ANTHROPIC_PATHS}/"):
        return True
    return any(name == ANTHROPIC_VERSION.encode() for name, _ in scope["headers"])


def anthropic_error(status: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_body(error: ApiError, scope: Scope) -> dict[str, Any]:
    """Return the object that tells the client of the request `scope` of `error`."""
    if speaks_anthropic(scope):
        return anthropic_error(error.status, error.message, scope.get("state", {}).get("request_id"))
    return error.body()
