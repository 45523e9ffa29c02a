"""`tidegate top`: what it shows, its errors, and how it ends in a terminal."""

import asyncio
import contextlib
import io
import os
import pty
import select
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import structlog
from redis.asyncio import Redis
from rich.console import Console

from gateway.identity import Keyring
from tests.gateway.routes.test_admin import key
from tests.gateway.second_model import OTHER, second_model
from tests.gateway.stand import Stand, make_tiers, serving_stand
from tests.test_architecture import ROOT
from tidegate.top.command import run_top
from tidegate.top.view import screen

TIER: dict[str, Any] = {
    "interactive": True,
    "waiting": 12,
    "head_waited_s": 0.25,
    "claimed": 1,
    "running": 7,
    "finished_per_s": 3.25,
    "slo": {"ttft_p99_s": 0.5, "itl_p99_s": 0.1},
    "ttft_p99_s": 0.75,
    "itl_p99_s": 0.05,
    "attainment": 0.985,
    "overloaded": False,
}
WORKER: dict[str, Any] = {
    "id": "w1",
    "device": "cuda:0",
    "busy": 0.5,
    "kv_usage": 0.93,
    "gpus": [{"name": "H100", "memory_used_mb": 2048, "memory_total_mb": 81920, "busy": 0.4}],
    "heartbeat_age_s": 0.4,
}
OVERVIEW: dict[str, Any] = {
    "at_ms": 1_700_000_000_000,
    "model": "beta",
    "models": ["alpha", "beta"],
    "draining": False,
    "open_requests": 14,
    "store": {"answers": True, "latency_ms": 0.42, "refusal": None},
    "tiers": {"realtime": TIER},
    "workers": [WORKER],
    "batches": {"in_progress": 2, "failed": 0, "completed": 14},
}


def shown(overview: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(screen(overview, "http://server"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row_of(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(name))


def test_everything_is_shown_in_one_screen() -> None:
    text = shown(OVERVIEW)
    assert " ".join(row_of(text, "realtime")) == "realtime 12 250 ms 1 7 3.2 750 ms 500 ms 50 ms 100 ms 98.5%"
    worker = " ".join(row_of(text, "w1"))
    assert worker == "w1 cuda:0 █████░░░░░ 50% █████████░ 93% 40.0% 2.0 of 80 GiB 400 ms ago"
    assert "beta (2 of 2)  14 open requests  store 0.4 ms" in text and "in_progress 2, completed 14" in text


def test_what_is_not_known_is_a_dash_and_what_is_missing_is_said() -> None:
    unknown = {"waiting": None, "head_waited_s": None, "ttft_p99_s": None, "itl_p99_s": None, "attainment": None}
    no_store = {"answers": False, "latency_ms": None, "refusal": None}
    tiers = {"realtime": {**TIER, **unknown}}
    text = shown({**OVERVIEW, "store": no_store, "tiers": tiers, "workers": [], "batches": None})
    assert row_of(text, "realtime")[1:3] == ["–", "–"]
    assert "store does not answer" in text and "No worker is alive." in text
    refuses = {"answers": True, "latency_ms": 1.0, "refusal": "OOM"}
    assert "store refuses writes: OOM" in shown({**OVERVIEW, "store": refuses})


async def test_once_prints_a_real_server_and_needs_an_administrators_key(capsys: pytest.CaptureFixture[str]) -> None:
    keyring = Keyring([key("root", role="admin"), key("user")])
    with structlog.testing.capture_logs():  # else the gateway's log would be in the output
        async with serving_stand(keyring=keyring) as stand:
            await look_with_keys(stand, capsys)


async def look_with_keys(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    async def top(*flags: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run_top, ["--once", "--base-url", f"{stand.url}/v1", *flags])
        return code, *capsys.readouterr()

    code, out, _ = await top("--api-key", "sk-root")
    assert code == 0 and "realtime" in out and "w1" in out and stand.url in out
    code, out, error = await top("--api-key", "sk-user")
    assert (code, out) == (1, "") and "admin: true" in error
    code, _, error = await top("--api-key", "sk-wrong")
    assert code == 1 and "TIDEGATE_API_KEY" in error


async def test_each_of_several_models_can_be_shown(redis_client: Redis, capsys: pytest.CaptureFixture[str]) -> None:
    second = second_model(redis_client, make_tiers(gold={"priority": 5}))
    with structlog.testing.capture_logs():
        async with serving_stand(redis=redis_client, more_models=[second.source]) as stand:
            flags = ["--once", "--base-url", stand.url, "--model"]
            assert await asyncio.to_thread(run_top, [*flags, OTHER]) == 0
            assert f"{OTHER} (2 of 2)" in (out := capsys.readouterr().out) and "gold" in out
            assert await asyncio.to_thread(run_top, [*flags, "nobody"]) == 1
            assert "nobody" in capsys.readouterr().err


async def test_without_a_terminal_it_prints_the_state_once(capsys: pytest.CaptureFixture[str]) -> None:
    with structlog.testing.capture_logs():
        async with serving_stand() as stand:
            assert await asyncio.to_thread(run_top, ["--base-url", stand.url]) == 0
    out = capsys.readouterr().out
    assert out.count("realtime") == 1 and "\x1b" not in out


@pytest.mark.parametrize(("url", "said"), [("nonsense", "no URL"), ("http://[::bad", "no URL"), ("", "no URL")])
def test_a_bad_url_is_one_sentence(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_top(["--once", "--base-url", url]) == 1
    assert said in capsys.readouterr().err


def test_a_server_that_is_away_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert run_top(["--once", "--base-url", url]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("ending", [b"q", b"\x03", b"mq"])
async def test_in_a_terminal_it_goes_on_until_q_or_ctrl_c(ending: bytes) -> None:
    async with serving_stand() as stand:
        seen, code = await asyncio.to_thread(in_terminal, ["--base-url", stand.url, "--interval-s", "0.2"], ending)
    assert seen.count("realtime") >= 2, "it is drawn again"
    assert code == 0


def in_terminal(flags: list[str], ending: bytes) -> tuple[str, int]:
    """Run the command on a terminal of its own; send `ending` when it has drawn twice. Return output and exit code."""
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate", "top", *flags],
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: own_terminal(its),
    )
    os.close(its)
    seen, until_s, sent = b"", time.monotonic() + 60, False
    with contextlib.suppress(OSError):  # the end of the command closes the terminal
        while time.monotonic() < until_s:
            if select.select([ours], [], [], 0.5)[0]:
                piece = os.read(ours, 65536)
                if not piece:
                    break
                seen += piece
            if not sent and seen.count(b"realtime") >= 2:
                os.write(ours, ending)
                sent = True
            if process.poll() is not None:
                break
    try:
        return seen.decode(errors="replace"), process.wait(timeout=60)
    finally:
        process.kill()
        os.close(ours)


def own_terminal(descriptor: int) -> None:
    """Make the terminal that of the new session, so that Ctrl-C there is a signal to it."""
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
