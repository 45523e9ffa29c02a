"""The Locust file, run by Locust itself: every tier's user works, and a wrong answer is a failure."""

import asyncio
import csv
import sys
from pathlib import Path

from tests.loadtest.fake_server import Body, FakeServer, repeat_or_count

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"


async def run_locust(server: FakeServer, folder: Path, *users: str) -> tuple[int, dict[str, dict[str, str]]]:
    """(exit code, statistics by name)"""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "locust", "-f", str(LOCUSTFILE), "--headless", "-u", "10", "-r", "10", "-t", "3s"),
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
        code, stats = await run_locust(server, tmp_path, "RealtimeUser", "BulkUser", "BatchUser")
    assert code == 0
    for name in ("realtime chat", "realtime first token", "realtime token gap", "bulk flex"):
        assert int(stats[name]["Request Count"]) > 0, name
    assert int(stats["batch of 10 lines"]["Request Count"]) > 0
    assert stats["Aggregated"]["Failure Count"] == "0"
    assert {body["service_tier"] for body in server.requests} == {"default", "flex"}


async def test_an_answer_that_is_not_its_nonce_is_a_failure(tmp_path: Path) -> None:
    def wrong(body: Body) -> list[str]:
        return [*repeat_or_count(body), "!"]

    async with FakeServer(reply=wrong) as server:
        code, stats = await run_locust(server, tmp_path, "RealtimeUser", "BulkUser")
    assert code == 1
    for name in ("realtime chat", "bulk flex"):
        assert stats[name]["Failure Count"] == stats[name]["Request Count"] != "0"


async def test_a_batch_without_an_output_file_is_a_failure(tmp_path: Path) -> None:
    async with FakeServer(output_file_id=None) as server:
        code, stats = await run_locust(server, tmp_path, "BatchUser")
    assert code == 1 and server.contents_asked == []
    assert stats["batch of 10 lines"]["Failure Count"] == stats["batch of 10 lines"]["Request Count"] != "0"
