"""`tidegate loadtest run` against the real server and the demo model."""

import json
from pathlib import Path

import pytest

from tests.system.server import Server, run_to_end

SHORT = ("--users", "2", "--duration", "1", "--warm-up", "0", "--rounds", "1", "--output-tokens", "8")
TIMEOUT_S = 200.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]  # a busy machine needs minutes for three processes


def test_tiers_on_and_off_are_compared(server: Server, tmp_path: Path) -> None:
    server.wait_until_ready()
    result = tmp_path / "r.json"
    flags = ("--compare", "tiers", "--bulk-users", "2", "--json", str(result))
    done = run_to_end("loadtest", "run", "--url", server.base_url, *SHORT, *flags, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    arms = json.loads(result.read_text())["arms"]
    assert arms["with tiers"]["bulk"]["answered_as"] == ["flex"]
    assert arms["without tiers"]["bulk"]["answered_as"] == ["default"]
    for classes in arms.values():
        for of_class in classes.values():
            assert of_class["mean_output_tokens"] == 8 and of_class["errors"] == 0
            assert of_class["ttft_s"]["p50"]["value"] > 0 and of_class["itl_s"]["samples"] > 0


def test_the_demo_model_is_started_for_a_run(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    flags = ("--serve", "--compare", "batching", "--json", str(result))
    done = run_to_end("loadtest", "run", *SHORT, *flags, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    measured = json.loads(result.read_text())
    assert measured["model"] == "tidegate-demo" and list(measured["arms"]) == ["batched", "one at a time"]
