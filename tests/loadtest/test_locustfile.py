"""The Locust file, run by Locust itself: every tier's user works, and a wrong answer is a failure."""

import asyncio
import csv
import sys
from pathlib import Path

import pytest

from tests.loadtest.fake_server import Body, FakeServer, repeat_or_count

pytestmark = pytest.mark.full
BATCH = "batch of 10 lines"
LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"


async def run_locust(
    server: FakeServer, folder: Path, *users: str, done: tuple[str, ...]
) -> tuple[int, dict[str, dict[str, str]]]:
    """(exit code, statistics by name), of a run long enough for all of `done` to be in them: a busy machine may need
    more than the usual few seconds."""
    for seconds in (3, 12, 40):
        code, stats = await _run_locust(server, folder, users, seconds)
        if all(int(stats.get(name, {}).get("Request Count", "0")) > 0 for name in done):
            break
    return code, stats


async def _run_locust(
    server: FakeServer, folder: Path, users: tuple[str, ...], seconds: int
) -> tuple[int, dict[str, dict[str, str]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "locust", "-f", str(LOCUSTFILE), "--headless", "-u", "10", "-r", "10", "-t", f"{seconds}s"),
        *("--host", server.url, "--csv", str(folder / "stats"), "--html", str(folder / "report.html"), *users),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
    )
    output, _ = await process.communicate()
    assert (folder / "report.html").exists(), output.decode()
    with (folder / "stats_stats.csv").open() as file:
        return process.returncode or 0, {row["Name"]: row for row in csv.DictReader(file)}


async def test_each_tiers_user_does_its_work(tmp_path: Path) -> None:
    async with FakeServer() as server:
        names = ("realtime chat", "realtime first token", "realtime token gap", "bulk flex", BATCH)
        code, stats = await run_locust(server, tmp_path, "RealtimeUser", "BulkUser", "BatchUser", done=names)
    assert code == 0
    for name in names:
        assert int(stats[name]["Request Count"]) > 0, name
    assert stats["Aggregated"]["Failure Count"] == "0"
    assert {body["service_tier"] for body in server.requests} == {"default", "flex"}


async def test_an_answer_that_is_not_its_nonce_is_a_failure(tmp_path: Path) -> None:
    def wrong(body: Body) -> list[str]:
        return [*repeat_or_count(body), "!"]

    async with FakeServer(reply=wrong) as server:
        names = ("realtime chat", "bulk flex")
        code, stats = await run_locust(server, tmp_path, "RealtimeUser", "BulkUser", done=names)
    assert code == 1
    for name in names:
        assert stats[name]["Failure Count"] == stats[name]["Request Count"] != "0"


async def test_a_batch_without_an_output_file_is_a_failure(tmp_path: Path) -> None:
    async with FakeServer(output_file_id=None) as server:
        code, stats = await run_locust(server, tmp_path, "BatchUser", done=(BATCH,))
    assert code == 1 and server.contents_asked == []
    assert stats[BATCH]["Failure Count"] == stats[BATCH]["Request Count"] != "0"
