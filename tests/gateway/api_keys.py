"""API keys of tests: the secret of the key `web` is `sk-web`."""

import hashlib
from typing import Any
from urllib.parse import quote

from gateway.identity import ApiKey


def secret_of(name: str) -> str:
    return f"sk-{quote(name)}"


def key(name: str, *more: Any, **options: Any) -> ApiKey:
    return ApiKey(name, hashlib.sha256(secret_of(name).encode()).digest(), *more, **options)


def as_(name: str) -> dict[str, str]:
    """Return the header with which a request comes from the key."""
    return {"authorization": f"Bearer {secret_of(name)}"}
