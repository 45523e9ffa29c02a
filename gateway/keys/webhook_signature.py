"""The signature of a webhook, as OpenAI's clients and the Standard Webhooks specification check it. Pure."""

import base64
import binascii
import hashlib
import hmac

PREFIX = "whsec_"
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64  # as in the specification


def secret_bytes(secret: str) -> bytes:
    """Return the bytes of a secret `whsec_<base64>`. Raises `ValueError`, which does not repeat it, if it is none."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"a secret of webhooks is {PREFIX} and the base64 of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} random "
            'bytes; make one with: echo "whsec_$(openssl rand -base64 32)"'
        )
    return key


def signed_headers(event_id: str, body: bytes, secret: str, now_s: int) -> dict[str, str]:
    """Return the headers that prove that `body` comes from who has the secret, at the time `now_s`."""
    signed = b".".join((event_id.encode(), str(now_s).encode(), body))
    digest = hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(now_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
