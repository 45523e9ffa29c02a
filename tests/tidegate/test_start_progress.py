"""The progress of a worker's start: on a terminal, in the log, and in the store for the gateways."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from engine.config import EngineStartError
from scheduler.registry.redis import RedisWorkerRegistry
from tests.terminal import stderr_of
from tests.waiting import until
from tidegate.worker import start_progress
from tidegate.worker.start_progress import StartProgress

PROGRAM = """
import sys
import structlog
from tidegate.logs import configure_logging, is_for_people
from tidegate.worker.start_progress import StartProgress
configure_logging("worker", "info", "auto")
progress = StartProgress("w1", "redis://127.0.0.1:1", sys.stderr.isatty() and is_for_people("auto"))
with progress.phase("loading the model") as phase:
    phase.show(1, 4)
    structlog.get_logger().info("something of a library")
with progress.phase("downloading", draws_itself=True):
    sys.stderr.write("its own bar\\r")
"""


@pytest.fixture(autouse=True)
def report_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_progress, "REPORT_S", 0.01)


async def test_the_phase_is_in_the_store_until_the_worker_serves(valkey_url: str, redis_client: Redis) -> None:
    registry = RedisWorkerRegistry(redis_client)

    async def share() -> float | None:
        [start] = await registry.starting()
        assert (start.worker_id, start.phase) == ("w1", "loading the model") and start.seconds >= 0
        return start.share

    async def is_quarter() -> bool:
        return await share() == 0.25

    async def is_known() -> bool:
        return bool(await registry.starting())

    with StartProgress("w1", valkey_url, on_terminal=False) as progress:
        with progress.phase("loading the model") as phase:
            await until(is_known)
            assert await share() is None
            phase.show(1, 4)
            await until(is_quarter)
        await asyncio.to_thread(progress.close)
        assert await registry.starting() == []


async def test_a_start_that_fails_is_withdrawn_too(valkey_url: str, redis_client: Redis) -> None:
    registry = RedisWorkerRegistry(redis_client)

    async def is_known() -> bool:
        return bool(await registry.starting())

    async def fail() -> None:
        with StartProgress("w1", valkey_url, on_terminal=False) as progress, progress.phase("loading the model"):
            await until(is_known)
            raise EngineStartError("no memory")

    with capture_logs() as logs, pytest.raises(EngineStartError):
        await fail()
    assert await registry.starting() == []
    assert logs == [], "a phase that has failed is not done"


def test_elsewhere_each_phase_is_one_line_of_json(tmp_path: Path) -> None:
    text = stderr_of(PROGRAM, tmp_path, on_terminal=False)
    lines = [line for line in text.splitlines() if line != "its own bar"]
    assert [json.loads(line).get("phase") for line in lines] == [None, "loading the model", "downloading"]


def test_on_a_terminal_a_line_shows_the_phase_and_its_share_below_the_log(tmp_path: Path) -> None:
    text = stderr_of(PROGRAM, tmp_path, on_terminal=True)
    shown = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
    assert any(re.search(r"loading the model ━.*25%", line) for line in shown)
    [logged] = [line for line in shown if "something of a library" in line]
    assert "━" not in logged, "the log is not in the line of progress"
    assert "its own bar" in text and not any("downloading" in line and "━" in line for line in shown)
