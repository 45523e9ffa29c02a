"""The k6 file: its syntax by node, and a run by k6 itself where there is one."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest.fake_server import Body, FakeServer, repeat_or_count

pytestmark = pytest.mark.full
SCRIPT = Path(__file__).parents[2] / "loadtest" / "k6.js"
NODE, K6 = shutil.which("node"), shutil.which("k6")


@pytest.mark.skipif(NODE is None, reason="no node")
def test_node_parses_it(tmp_path: Path) -> None:
    module = tmp_path / "k6.mjs"  # a module, as k6 reads it
    module.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    assert NODE is not None
    done = subprocess.run([NODE, "--check", str(module)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def run_k6(server: FakeServer, folder: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the metrics of a short run."""
    assert K6 is not None
    summary = folder / "summary.json"
    process = await asyncio.create_subprocess_exec(
        *(K6, "run", "--quiet", "--no-usage-report", "--summary-export", str(summary)),
        *("-e", f"BASE_URL={server.url}", "-e", "USERS=3", "-e", "BULK_USERS=2", "-e", "DURATION=2s", str(SCRIPT)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"TIDEGATE_API_KEY": "secret"},
    )
    out, _ = await process.communicate()
    assert summary.exists(), out.decode()
    metrics: dict[str, Any] = json.loads(summary.read_text())["metrics"]
    return process.returncode or 0, metrics


@pytest.mark.skipif(K6 is None, reason="no k6")
async def test_k6_runs_both_tiers(tmp_path: Path) -> None:
    async with FakeServer() as server:
        code, metrics = await run_k6(server, tmp_path)
    assert code == 0
    assert metrics["checks"]["fails"] == 0 < metrics["checks"]["passes"]
    assert metrics["output_tokens"]["count"] > 0 and metrics["first_bytes"]["med"] > 0
    assert {body["service_tier"] for body in server.requests} == {"default", "flex"}
    assert {bool(body.get("stream")) for body in server.requests} == {True, False}


@pytest.mark.skipif(K6 is None, reason="no k6")
async def test_k6_fails_after_wrong_answers(tmp_path: Path) -> None:
    def wrong(body: Body) -> list[str]:
        return [*repeat_or_count(body), "!"]

    async with FakeServer(reply=wrong) as server:
        code, metrics = await run_k6(server, tmp_path)
    assert code != 0 and metrics["checks"]["fails"] > 0
