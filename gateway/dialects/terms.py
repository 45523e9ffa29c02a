"""The names of a chat's parameters in the APIs that are answered as chats.

Knows paths of parameters and errors; does not know the APIs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.protocol.errors import ApiError, invalid_request

Paths = Sequence[tuple[str, str]]


def path_here(path: str, paths: Paths) -> str | None:
    """Return the path of a chat's parameter in an API; None if `paths` does not tell.

    `paths` has beginnings of paths in a chat, and what they are in the API. The first that fits counts. The messages of
    a chat are not numbered as those of the API are.
    """
    for old, new in paths:
        if path == old or path.startswith((f"{old}.", f"{old}[")):
            return new if old == "messages" else new + path[len(old) :]
    return path.replace(".function.", ".", 1) if path.startswith("tool_choice.") else None


def renamed(error: ApiError, new: str) -> ApiError:
    """Return `error` with `new` as the path of its parameter."""
    message = error.message.replace(f"'{error.param}'", f"'{new}'")
    return ApiError(error.status, message, error.type, new, error.code, error.headers)


def refuse_moved(body: dict[str, Any], moved: Mapping[str, str], api: str) -> None:
    """Refuse parameters of chats that the API calls otherwise. Raises `ApiError` 400 with the name to use instead."""
    for name, here in moved.items():
        if body.get(name) is not None:
            message = f"Unsupported parameter: '{name}'. In the {api} API, use '{here}' instead."
            raise invalid_request(message, name, "unsupported_parameter")
