"""`tidegate serve --engine static`: tasks on the real processes, and a worker that is killed."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.server import Server, running, wait_for

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

BATCH = 8


class Endpoint(BaseHTTPRequestHandler):
    """Squares numbers. Calls wait at `gate`; `called` is set when one begins."""

    gate = threading.Event()
    called = threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert len(body["items"]) == BATCH
        self.called.set()
        self.gate.wait(60)
        data = json.dumps({"results": [{"output": item**2} for item in body["items"]]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return None


@contextmanager
def serving_endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/run"
        Endpoint.gate.set()
        server.shutdown()


@pytest.fixture
def static_server(tmp_path: Path) -> Iterator[Server]:
    Endpoint.gate.clear()
    Endpoint.called.clear()
    with serving_endpoint() as url:
        flags = ("--engine", "static", "--endpoint", url, "--batch", str(BATCH))
        with running(tmp_path, *flags) as server:
            server.wait_until_ready()
            yield server


def test_a_killed_worker_loses_no_task(static_server: Server) -> None:
    with httpx.Client(base_url=static_server.base_url, timeout=60) as http:
        created = http.post("/tasks", json={"inputs": list(range(20))})
        assert created.status_code == 202, created.text
        assert Endpoint.called.wait(30)
        static_server.kill("worker")
        Endpoint.gate.set()
        for number, task in enumerate(created.json()["data"]):
            ended = http.get(f"/tasks/{task['id']}", params={"wait_s": 50}).json()
            assert (ended["state"], ended["result"]) == ("done", number**2)
    wait_for(lambda: static_server.metric("tidegate_tasks_ended_total", state="done") == 20, what="all ends counted")
