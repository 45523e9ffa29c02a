"""The whole gateway on a store that refuses writes: no route answers with an error of the server's own."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from structlog.testing import capture_logs

from gateway.app import create_app
from gateway.files import marker
from scheduler.client import client as scheduler_client
from scheduler.clock import SystemClock
from scheduler.store import connection
from scheduler.store.errors import CAUSES
from tests.refusals import CODES, limitable_valkey, refusing
from tests.waiting import until
from tidegate.gateway import process
from tidegate.gateway.parts import build_gateway, open_outside
from tidegate.settings.gateway import GatewaySettings

pytestmark = pytest.mark.timeout(120)

CHAT: dict[str, Any] = {"model": "tidegate-demo", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tidegate-demo", "prompt": "hi"},
    "/v1/responses": {"model": "tidegate-demo", "input": "hi"},
    "/v1/batches": {"input_file_id": "FILE", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
}
NEEDS_WRITES = {*BODIES, "/v1/files", "/v1/files/{file_id}"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with limitable_valkey(tmp_path_factory.mktemp("store")) as url:
        yield url


@pytest.fixture(autouse=True)
def frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_client, "REFRESH_S", 0.05)
    monkeypatch.setattr(connection, "RETRIES", 1)  # for a node that is not the primary


@asynccontextmanager
async def running_app(url: str, data_dir: Path, **settings: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """Run the shipped gateway without a port, on the store at `url`. No worker is there."""
    chosen = GatewaySettings(redis_url=url, data_dir=data_dir, **settings)
    async with AsyncExitStack() as stack:
        redis = connection.connect(url)
        stack.push_async_callback(redis.aclose)
        await redis.flushall()
        clock = SystemClock()
        around = open_outside(chosen, redis, clock)
        app = create_app(build_gateway(chosen, redis, clock, "gateway test", around))
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30)
        yield app, await stack.enter_async_context(http)


async def upload(http: httpx.AsyncClient) -> httpx.Response:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    files = {"file": ("in.jsonl", json.dumps(line).encode())}
    return await http.post("/v1/files", files=files, data={"purpose": "batch"})


async def call(http: httpx.AsyncClient, method: str, path: str, file_id: str) -> httpx.Response:
    if (method, path) == ("POST", "/v1/files"):
        return await upload(http)
    body = json.loads(json.dumps(BODIES.get(path, {})).replace("FILE", file_id)) if method == "POST" else None
    filled = path.replace("{file_id}", file_id).replace("{", "").replace("}", "")
    return await http.request(method, filled, json=body)


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Return the method and the path of every route, without the endless stream of /admin."""
    found = [(m, r.path) for r in app.routes if isinstance(r, APIRoute) for m in sorted(r.methods)]
    return [(method, path) for method, path in found if not path.endswith("/stream")]


@pytest.mark.parametrize("code", CODES)
async def test_every_route_answers_503_with_the_cause_or_goes_on(
    store: str, tmp_path: Path, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_app(store, tmp_path) as (app, http):
        file_id = (await upload(http)).json()["id"]
        client = app.state.gateway.client
        before = sorted(path for path in tmp_path.rglob("*"))
        with refusing(store, code):
            await until(lambda: client.refusal is not None)
            for method, path in routes_of(app):
                response = await call(http, method, path, file_id)
                assert response.status_code < 500 or response.status_code == 503, (method, path, response.text)
                if response.status_code == 503 and path.startswith("/v1"):
                    assert CAUSES[code] in response.json()["error"]["message"]
                    assert int(response.headers["retry-after"]) >= 1
                if path in NEEDS_WRITES and method == "POST":
                    assert response.status_code == 503, (method, path, response.text)
            assert (await http.get(f"/v1/files/{file_id}/content")).status_code in (200, 404)
            ready = (await http.get("/ready")).json()
            assert "store" in ready["missing"]
            assert CAUSES[code] in ready["refusal"]
        await until(lambda: client.refusal is None)
        after = sorted(path for path in tmp_path.rglob("*"))
        assert set(after) <= {*before, tmp_path / marker.NAME}, "a refused request leaves nothing on the disk"
        assert (await upload(http)).status_code == 200
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("code", CODES)
def test_a_gateway_does_not_start_on_a_store_that_refuses_and_says_why(
    store: str, tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of these stores answer a PING. The gateway's first write would end it with a traceback."""
    monkeypatch.setattr(process, "REACH_S", 0.0)
    settings = GatewaySettings(redis_url=store, data_dir=tmp_path, port=0)
    with refusing(store, code), capture_logs() as logs:
        assert process.run_gateway(settings) == 1
    assert logs[-1]["event"] == "the store does not answer" and CAUSES[code] in logs[-1]["reason"]
