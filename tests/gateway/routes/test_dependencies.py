"""Web pages of other origins and other host names may not use a server without keys. With keys, a key is enough."""

import asyncio
from typing import Any

import msgspec
import pytest
import structlog

from gateway.identity import Keyring
from gateway.routes.dependencies import FREE
from tests.gateway.api_keys import key
from tests.gateway.stand import Stand, running_stand, serving_stand
from tests.gateway.tiny_model import MODEL

CHAT = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})

KEYRING = Keyring([key("right")])


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


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_an_open_server_refuses_pages_that_do_not_tell_their_origin(site: str) -> None:
    headers = {"sec-fetch-site": site}
    async with running_stand() as stand:
        model = await stand.http.get("/v1/models", headers=headers)
        admin = await stand.http.get("/admin/sla", headers=headers)
    assert (model.status_code, model.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert admin.status_code == 403
    async with running_stand(allowed_origins=["null"]) as stand:
        assert (await stand.http.get("/v1/models", headers=headers)).status_code == 200
    async with running_stand(keyring=KEYRING) as stand:
        keyed = await stand.http.get("/v1/models", headers={**headers, "authorization": "Bearer sk-right"})
    assert keyed.status_code == 200


async def test_an_open_server_serves_programs_and_its_own_pages() -> None:
    async with running_stand(allowed_hosts=["gate.example"]) as stand:
        assert (await stand.http.post("/v1/chat/completions", content=CHAT)).status_code == 200
        assert (await post_as_a_page(stand, stand.url)).status_code == 200
        for site in ("same-origin", "none"):
            assert (await stand.http.get("/v1/models", headers={"sec-fetch-site": site})).status_code == 200
        assert (await post_as_a_page(stand, "https://Gate.example", host="gate.example")).status_code == 200


ROUTES = ["/", "/health", "/ready", "/metrics", "/docs", "/openapi.json", "/v1/models", "/admin/sla", "/nowhere"]


@pytest.mark.parametrize("path", ROUTES)
async def test_an_open_server_refuses_other_host_names_on_all_routes(path: str) -> None:
    async with running_stand() as stand:
        refused = await stand.http.get(path, headers={"host": "rebound.example:8000"})
        served = await stand.http.get(path, headers={"host": "localhost:8000"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in error["message"] and "--api-keys" in error["message"]
    assert served.status_code in (200, 404)


HOST_LINES = {
    b"": 400,
    b"Host: 127.0.0.1\r\nHost: 127.0.0.1\r\n": 400,
    b"Host: 127.0.0.1\r\nhOST: other.example\r\n": 400,
    b"Host: evil@127.0.0.1\r\n": 400,
    b"Host: 127.0.0.1/path\r\n": 400,
    b"Host: 127.0.0.1 127.0.0.1\r\n": 400,
    b"Host: [::1\r\n": 400,
    b"Host: 127.0.0.1:8000\r\n": 200,
    b"Host: [::1]:8000\r\n": 200,
    b"Host:\r\n": 200,
}


@pytest.mark.parametrize("keyring", [None, KEYRING])
async def test_a_request_has_one_valid_host_header(keyring: Keyring | None) -> None:
    async with serving_stand(keyring=keyring) as stand:
        host, port = stand.url.removeprefix("http://").split(":")

        async def status(head: bytes) -> int:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + b"\r\n")
            line = await reader.readline()
            writer.close()
            return int(line.split()[1])

        answers = {lines: await status(b"GET /health HTTP/1.1\r\n" + lines) for lines in HOST_LINES}
        assert answers == HOST_LINES
        assert await status(b"GET /health HTTP/1.0\r\n") == 200


@pytest.mark.parametrize(
    "header", ["forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"]
)
async def test_a_request_through_a_proxy_is_not_local(header: str) -> None:
    async with running_stand() as stand:
        assert (await stand.http.get("/admin/sla")).status_code == 200
        response = await stand.http.get("/admin/sla", headers={header: "127.0.0.1"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "insufficient_permissions")


async def test_a_request_of_http_1_0_is_not_local() -> None:
    async with serving_stand() as stand:
        host, port = stand.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /admin/sla HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        assert b" 403 " in await reader.readline()
        writer.close()


async def test_many_wrong_keys_are_refused_slowly_and_right_ones_at_once() -> None:
    wrong, right = {"authorization": "Bearer sk-wrong"}, {"authorization": "Bearer sk-right"}
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        async with running_stand(keyring=KEYRING) as stand:
            for _ in range(FREE):
                assert (await stand.http.get("/v1/models", headers=wrong)).status_code == 401
            slow = asyncio.create_task(stand.http.get("/v1/models", headers=wrong))
            assert (await stand.http.get("/v1/models", headers=right)).status_code == 200
            assert not slow.done()
            assert (await slow).status_code == 401
    refusals = [entry for entry in logs if entry["event"] == "request" and entry["status"] == 401]
    assert {entry["client"] for entry in refusals} == {"127.0.0.1"}
    assert ["delayed_s" in entry for entry in refusals] == [False] * FREE + [True]


async def test_private_docs_need_a_key() -> None:
    right = {"authorization": "Bearer sk-right"}
    async with running_stand(keyring=KEYRING, private_docs=True) as stand:
        for path in ("/openapi.json", "/metrics"):
            assert (await stand.http.get(path)).status_code == 401
            assert (await stand.http.get(path, headers=right)).status_code == 200
        assert (await stand.http.get("/docs")).status_code == 404
        assert (await stand.http.get("/health")).status_code == 200
