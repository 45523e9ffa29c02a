"""Web pages of other origins may not use a server without keys. With keys, a key is enough."""

import hashlib
from typing import Any

import msgspec
import pytest

from gateway.identity import ApiKey, Keyring
from tests.gateway.stand import MODEL, Stand, running_stand

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})


async def post_as_a_page(stand: Stand, origin: str, **headers: str) -> Any:
    """Send what a page's `fetch(…, {method: "POST", mode: "no-cors"})` sends without a preflight request."""
    headers = {"content-type": "text/plain", "origin": origin, **headers}
    return await stand.http.post("/v1/chat/completions", content=CHAT, headers=headers)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1", "http://[", "file://"]
)
async def test_an_open_server_refuses_pages_of_other_origins(origin: str) -> None:
    async with running_stand() as stand:
        response = await post_as_a_page(stand, origin)
        upload = await stand.http.post("/v1/files", files={"file": b"{}"}, headers={"origin": origin})
        assert stand.worker.served == []
    assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert (upload.status_code, upload.json()["error"]["code"]) == (403, "origin_not_allowed")


async def test_an_open_server_serves_programs_and_its_own_pages() -> None:
    async with running_stand() as stand:
        assert (await stand.http.post("/v1/chat/completions", content=CHAT)).status_code == 200
        assert (await post_as_a_page(stand, stand.url)).status_code == 200
        assert (await post_as_a_page(stand, "https://Gate.example", host="gate.example")).status_code == 200


async def test_a_key_is_enough() -> None:
    keyring = Keyring([ApiKey("a", hashlib.sha256(b"sk-right").digest())])
    async with running_stand(keyring=keyring) as stand:
        served = await post_as_a_page(stand, "http://evil.example", authorization="Bearer sk-right")
        refused = await post_as_a_page(stand, "http://evil.example")
    assert (served.status_code, refused.status_code) == (200, 401)
