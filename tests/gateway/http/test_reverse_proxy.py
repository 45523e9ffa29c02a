"""The reverse proxy of docs/security.md, a real nginx in front of a gateway: streams, limits, what it keeps out."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import structlog

from gateway.identity import Keyring
from tests.gateway.api_keys import as_, key
from tests.gateway.http.test_tls import trusting, write_certificate
from tests.gateway.scripted_worker import token_by_token
from tests.gateway.stand import Stand, serving_stand
from tests.gateway.tiny_model import MODEL, token_ids
from tests.system.server import free_port
from tests.waiting import until

CONFIGURATION = Path(__file__).parents[3] / "docker" / "nginx.conf"
# Run in one process, as the user of the test, with all of its files below the prefix.
MAIN = """
daemon off; master_process off; error_log stderr warn; pid nginx.pid;
events {{ }}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy;
    fastcgi_temp_path fcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
{site}
}}
"""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LIMIT = "rate=50r/s", "rate=1r/m"
BURST = "burst=200", "burst=1"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="no `nginx` on the PATH (apt-get install nginx)"),
]


@asynccontextmanager
async def proxied(upstream: str, folder: Path, *changes: tuple[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """Run nginx with the configuration, but for `changes`, before the gateway at `upstream`. Yield a client of it."""
    port, (certfile, keyfile) = free_port(), write_certificate(folder)
    site = CONFIGURATION.read_text()
    for old, new in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("server 127.0.0.1:8000", f"server {upstream.removeprefix('http://')}"),
        ("/etc/nginx/tidegate.pem", str(certfile)),
        ("/etc/nginx/tidegate.key", str(keyfile)),
        *changes,
    ):
        assert site.count(old) == 1, old
        site = site.replace(old, new)
    (folder / "nginx.conf").write_text(MAIN.format(site=site))
    process = await asyncio.create_subprocess_exec("nginx", "-p", str(folder), "-c", "nginx.conf")
    try:
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trusting(), timeout=30) as client:

            async def is_up() -> bool:
                assert process.returncode is None
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", port)) == 0

            await until(is_up)
            yield client
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def behind(folder: Path, *changes: tuple[str, str]) -> AsyncIterator[tuple[Stand, httpx.AsyncClient]]:
    """Run a gateway with keys behind nginx."""
    async with (
        serving_stand(keyring=Keyring([key("web"), key("root", role="admin")])) as stand,
        proxied(stand.url, folder, *changes) as client,
    ):
        yield stand, client


async def test_a_stream_comes_token_by_token_and_ends_when_its_client_hangs_up(tmp_path: Path) -> None:
    async with behind(tmp_path) as (stand, client):
        stand.worker.script = lambda request: token_by_token(request, token_ids("Hello there!"))[:1]
        body = {**CHAT, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=as_("web")) as response:
            assert b'"content":"H"' in await anext(response.aiter_raw())  # nothing follows that could push it on
        await until(lambda: stand.waiting == 0 and len(stand.worker.cancelled) == 1)


async def test_the_client_cannot_claim_an_address_and_uploads_have_the_gateways_limits(tmp_path: Path) -> None:
    async with behind(tmp_path) as (stand, client):
        with structlog.testing.capture_logs() as logs:
            form = {"files": {"file": ("a.txt", b"x" * 2**21)}, "data": {"purpose": "user_data"}}
            stored = await client.post("/v1/files", headers=as_("web") | {"x-forwarded-for": "192.0.2.66"}, **form)
        large = await client.post("/v1/chat/completions", json={**CHAT, "pad": "x" * 2**21}, headers=as_("web"))
    assert stored.status_code == 200
    assert [line["client"] for line in logs if line.get("route") == "/v1/files"] == ["127.0.0.1"]
    assert large.status_code == 413 and "error" in large.json()


async def test_what_is_for_operators_and_what_is_too_much_ends_at_the_proxy(tmp_path: Path) -> None:
    async with behind(tmp_path, LIMIT, BURST) as (_, client):
        admin = await client.get("/admin/sla", headers=as_("root"))
        answers = [await client.get("/v1/models", headers=as_("web")) for _ in range(3)]
    assert admin.status_code == 403 and "server" in admin.headers
    assert answers[-1].status_code == 429
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded" and answers[-1].headers["retry-after"] == "1"


async def test_a_gateway_that_is_away_is_a_503_in_the_format_of_the_api(tmp_path: Path) -> None:
    async with proxied(f"http://127.0.0.1:{free_port()}", tmp_path) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert answer.headers["retry-after"] == "2"
