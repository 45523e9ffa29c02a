"""Opens the endpoint that the settings name: a URL, or a Python function."""

from urllib.parse import urlsplit

import httpx

from engine.config import EngineStartError
from engine.static.function_endpoint import PREFIX, FunctionEndpoint, load_function
from engine.static.http_endpoint import HttpEndpoint
from engine.static.interface import Endpoint


def open_endpoint(spec: str, batch: int, timeout_s: float) -> Endpoint:
    """Return the endpoint. Raises `EngineStartError` if `spec` names none."""
    if spec.startswith(PREFIX):
        return FunctionEndpoint(spec, load_function(spec), batch, timeout_s)
    if not _is_url(spec):
        raise EngineStartError(f"the endpoint {spec!r} is neither http://HOST/PATH nor python:module.function")
    return HttpEndpoint(spec, batch, timeout_s)


def _is_url(spec: str) -> bool:
    try:
        url, _ = urlsplit(spec), httpx.URL(spec)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except (ValueError, httpx.InvalidURL):  # such as a port that is no number, or too large a one
        return False
