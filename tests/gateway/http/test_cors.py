"""CORS: pages of allowed origins get headers on every answer; preflight requests need no key."""

from typing import Any

import httpx
import pytest

from gateway.http.access.cors import AllowedOrigins
from gateway.identity import Keyring
from tests.gateway.api_keys import key
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL

PAGE = "https://chat.example"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
KEYED = Keyring([key("right")])


async def preflight(stand: Stand, origin: str, headers: str = "authorization,content-type") -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": headers}
    return await stand.http.options("/v1/chat/completions", headers=asked)


@pytest.mark.parametrize(
    ("entries", "allowed", "refused"),
    [
        ((), (), (PAGE, "null", "*")),
        (("*",), (PAGE, "null", "app://obsidian.md"), ()),
        ((PAGE,), (PAGE,), ("http://chat.example", "https://chat.example:8443", "https://chat.example.evil", "null")),
        (("https://Chat.example/",), (PAGE,), ()),
        (("null",), ("null",), (PAGE,)),
        (("app://obsidian.md", "tauri://localhost"), ("app://obsidian.md", "tauri://localhost"), ("app://other",)),
        (("chrome-extension://*",), ("chrome-extension://abcdef",), ("moz-extension://abcdef",)),
        (("http://localhost:*",), ("http://localhost:3000",), ("http://localhost.evil:3000", "http://localhost")),
        (("https://*.example",), (PAGE,), ("https://example", "https://evil/.example")),
        (("file://",), ("file://",), ("file://host",)),
    ],
)
def test_the_entries_of_the_setting(
    entries: tuple[str, ...], allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    origins = AllowedOrigins(entries)
    assert [o for o in (*allowed, *refused) if origins.allows(o)] == list(allowed)


@pytest.mark.parametrize("entry", [PAGE, "*"])
async def test_a_preflight_needs_no_key(entry: str) -> None:
    async with running_stand(keyring=KEYED, allowed_origins=[entry]) as stand:
        response = await preflight(stand, PAGE, "authorization, x-stainless-lang, x-tidegate-receipt")
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == (PAGE if entry == PAGE else "*")
    assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-lang, x-tidegate-receipt"
    assert {"POST", "DELETE"} <= set(response.headers["access-control-allow-methods"].split(", "))
    assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("entries", [(), ("https://other.example",)])
async def test_a_refusal_names_the_setting(entries: tuple[str, ...]) -> None:
    async with running_stand(allowed_origins=entries) as stand:
        asked = await preflight(stand, PAGE)
        posted = await stand.post("/v1/chat/completions", CHAT, headers={"origin": PAGE})
        assert stand.worker.served == []
    for response in (asked, posted):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (403, "origin_not_allowed")
        assert f"--allowed-origins {PAGE}" in error["message"]
        assert "access-control-allow-origin" not in response.headers


async def test_pages_of_an_allowed_origin_are_served_and_may_read_answers_errors_and_streams() -> None:
    async with running_stand(allowed_origins=[PAGE]) as stand:
        headers = {"origin": PAGE}
        answers = [
            await stand.post("/v1/chat/completions", CHAT, headers=headers),
            await stand.post("/v1/chat/completions", {**CHAT, "stream": True}, headers=headers),
            await stand.post("/v1/chat/completions", {**CHAT, "n": 0}, headers=headers),
            await stand.post("/v1/chat/completions", {**CHAT, "pad": "x" * 2**20}, headers=headers),
            await stand.http.get("/v1/models", headers=headers),
            await stand.http.get("/nowhere", headers=headers),
        ]
    assert [a.status_code for a in answers] == [200, 200, 400, 413, 200, 404]
    assert {a.headers["access-control-allow-origin"] for a in answers} == {PAGE}
    exposed = {name.strip() for name in answers[0].headers["access-control-expose-headers"].split(",")}
    assert {"x-request-id", "retry-after", "retry-after-ms", "x-ratelimit-remaining-requests", "*"} <= exposed


async def test_an_unexpected_error_has_the_headers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stand(allowed_origins=[PAGE]) as stand:

        async def broken(*args: object, **kwargs: object) -> None:
            raise LookupError("a bug")

        monkeypatch.setattr(stand.gateway.client, "submit", broken)
        response = await stand.post("/v1/chat/completions", CHAT, headers={"origin": PAGE})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (500, PAGE)


async def test_no_page_of_another_origin_administrates_without_a_key() -> None:
    async with running_stand(allowed_origins=["*"]) as stand:
        response = await stand.http.get("/admin/sla", headers={"origin": PAGE})
        own = await stand.http.get("/admin/sla", headers={"origin": stand.url})
    assert (response.status_code, own.status_code) == (403, 200)
