"""Explain a path that this server does not have: an endpoint of OpenAI that is not served, or a mistake in the URL.

Knows paths and routes; does not know what the routes do.
"""

from collections.abc import Sequence
from difflib import get_close_matches

from starlette.routing import BaseRoute, Match

from gateway.protocol.errors import ApiError, invalid_request

# First parts, behind /v1, of the paths of OpenAI's endpoints that this server does not serve, also of retired ones.
OPENAI = """
    answers assistants audio chatkit classifications containers edits engines evals fine-tunes
    fine_tuning images moderations organization projects realtime search skills threads vector_stores videos
"""
OTHERS = "classify pooling score"  # the same, of vLLM
NOT_SERVED = frozenset((OPENAI + OTHERS).split())
# Likeness from which a served path counts as the one that was meant, on difflib's scale from 0 to 1.
MIN_LIKENESS = 0.85
MAX_PARTS = 16  # paths with more parts are not examined: the work would grow with the square of their length


def unknown_url(where: str, path: str, routes: Sequence[BaseRoute]) -> ApiError:
    """Return the error for a request of a path that is none of `routes`. `where` is the method and the path.

    An endpoint of OpenAI that is not served gets 400: proxies take a 404 for a server that is broken or lacks the
    model, and stop using it for all requests.
    """
    paths = {str(getattr(route, "path", "")) for route in routes}
    served = sorted(found for found in paths if found.startswith("/v1/") and "{" not in found)
    parts = [part for part in path.split("/") if part]
    behind, meant = parts[_end_of_prefix(parts) :], None
    if behind and len(parts) <= MAX_PARTS:
        candidates = ("/" + "/".join(parts), "/v1/" + "/".join(behind), "/" + "/".join(behind))
        meant = next((found for found in candidates if found != path and _is_served(found, routes)), None)
        if meant is None and (behind[0] in NOT_SERVED or behind[:2] == ["chat", "completions"]):
            message = f"{where} is not served here. This server generates text. It serves {', '.join(served)}."
            return invalid_request(message, code="endpoint_not_served")
        meant = meant or _nearest(behind, served)
    hint = f" Did you mean {meant}?" if meant else ""
    if meant and path.count("/v1/") != meant.count("/v1/"):
        hint += " The base URL of a client ends with /v1."
    return ApiError(404, f"Unknown request URL: {where}.{hint}")


def _is_served(path: str, routes: Sequence[BaseRoute]) -> bool:
    scope = {"type": "http", "method": "GET", "path": path}
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)


def _nearest(behind: Sequence[str], served: Sequence[str]) -> str | None:
    ends = ["/v1/" + "/".join(behind[i:]) for i in range(1, len(behind))]  # such as behind /openai/deployments/NAME
    close = get_close_matches("/v1/" + "/".join(behind), served, n=1, cutoff=MIN_LIKENESS)
    return next((path for path in (*ends, *close) if path in served), None)


def _end_of_prefix(parts: Sequence[str]) -> int:
    """Return the index behind the last `v1`; 0 if there is none."""
    return max((i + 1 for i, part in enumerate(parts) if part == "v1"), default=0)
