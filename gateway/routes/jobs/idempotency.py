"""The header `Idempotency-Key` of the routes that create something: batches, files, responses and tasks."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from gateway.protocol.errors import invalid_value
from gateway.state import gateway_of

HEADER = "Idempotency-Key"
MAX_KEY_LENGTH = 255  # characters, as Stripe's keys may have
REPLAYED = {"idempotent-replayed": "true"}


def idempotency_key(request: Request) -> str | None:
    """Return the key of the request; None if it has none. Raises `ApiError` 400 if the key is empty or too long."""
    key = request.headers.get(HEADER)
    if key is not None and not 0 < len(key) <= MAX_KEY_LENGTH:
        raise invalid_value(HEADER, f"Invalid value for '{HEADER}': must have from 1 to {MAX_KEY_LENGTH} characters.")
    return key


async def once(
    request: Request,
    owner: str | None,
    body_digest: str,
    execute: Callable[[str], Awaitable[Response]],
    status_code: int = 200,
) -> Response:
    """Return the JSON response of `execute`, or that of the first request with the same key.

    `execute` gets 24 hex digits for the id of what it creates. Only responses with `status_code` are kept.
    """
    key, store = idempotency_key(request), gateway_of(request).idempotency
    if key is None:
        return await execute(secrets.token_hex(12))
    bad: list[Response] = []

    async def answer(new_id: str) -> bytes | None:
        response = await execute(new_id)
        if response.status_code != status_code:
            bad.append(response)
            return None
        return bytes(response.body)

    fingerprint = hashlib.sha256(f"{request.method} {request.url.path}\0{body_digest}".encode()).hexdigest()
    kept = await store.run(key, owner, fingerprint, answer)
    if kept is None:
        return bad[0]
    headers = REPLAYED if kept.is_replayed else None
    return Response(kept.answer, status_code, headers, media_type="application/json")
