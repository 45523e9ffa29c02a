"""Opens the endpoint that the settings name: a URL, or a Python function."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from engine.config import EngineStartError
from engine.static.function_endpoint import FunctionEndpoint
from engine.static.http_endpoint import HttpEndpoint
from engine.static.interface import Endpoint

PREFIX = "python:"  # before module.function


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


def load_function(spec: str) -> Callable[[list[Any]], Any]:
    """Return the function that `python:module.function` names. Modules of the working directory are found too."""
    module_name, _, function_name = spec.removeprefix(PREFIX).rpartition(".")
    if not module_name or not function_name:
        raise EngineStartError(f"{spec!r} names no function: write python:module.function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, SyntaxError, SystemExit) as error:
        raise EngineStartError(f"the endpoint {spec} cannot be loaded: {error}") from error
    if not callable(function):
        raise EngineStartError(f"the endpoint {spec} is not a function")
    return function  # type: ignore[no-any-return]
