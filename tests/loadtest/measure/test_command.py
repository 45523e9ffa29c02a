"""`loadtest run` as a user runs it, against a fake server: arms, errors, and how it ends."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.measure import command as run_command
from loadtest.running import MissingExtra
from tests.loadtest.fake_server import Body, FakeServer
from tests.loadtest.test_commands import loadtest

SHORT = ("--duration", "0.4", "--warm-up", "0", "--output-tokens", "3", "--prompt-tokens", "4")


async def run(server: FakeServer, *flags: str) -> tuple[int, str, str]:
    return await loadtest("run", "--url", server.url, *SHORT, *flags)


async def test_users_are_measured_and_written(tmp_path: Path) -> None:
    files = (tmp_path / "new" / "r.json", tmp_path / "new" / "r.html")
    async with FakeServer() as server:
        code, out, err = await run(server, "--users", "3", "--json", str(files[0]), "--html", str(files[1]))
    assert code == 0, err
    result = json.loads(files[0].read_text())
    chat = result["arms"]["load"]["interactive"]
    assert chat["completed"] >= 3 and chat["errors"] == 0 and chat["mean_output_tokens"] == 3
    assert len(server.requests) == chat["offered"] + 1, "one request before the measurement"
    assert all(body["stream"] and body["messages"] and "service_tier" not in body for body in server.requests)
    assert result["options"]["users"] == 3 and "loadtest run" in result["command"]
    assert "requests finished" in out and "interactive: 3 interactive users" in out
    assert "<svg" in files[1].read_text() and "measuring" in err


async def test_figures_are_printed_where_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with FakeServer() as server:
        code, out, err = await run(server, "--users", "2", "--html", str(tmp_path / "file" / "r.html"))
    assert code == 2 and "requests finished" in out
    assert "Traceback" not in err and "file" in err.splitlines()[-1]


async def test_requests_at_a_rate_are_whole_completions() -> None:
    async with FakeServer() as server:
        code, out, err = await run(server, "--rate", "50", "--endpoint", "completions", "--no-stream")
    assert code == 0, err
    assert all(body["stream"] is False and len(body["prompt"]) == 4 for body in server.requests)
    assert re.search(r"TTFT p50 +–", out) and "50 interactive requests/s" in out


async def test_tiers_on_and_off_differ_in_one_field() -> None:
    async with FakeServer() as server:
        code, out, err = await run(server, "--users", "2", "--bulk-users", "2", "--compare", "tiers")
    assert code == 0, err
    tiers = [body.get("service_tier") for body in server.requests]
    assert {"flex", None} == set(tiers)
    assert "with tiers  without tiers" in out and "bulk, times in ms" in out and "interactive, times in ms" in out


async def test_batching_is_compared_with_one_at_a_time(tmp_path: Path) -> None:
    result, most = tmp_path / "r.json", 1e6
    flags = ("--users", "4", "--compare", "batching", "--rounds", "1")
    async with FakeServer() as server:
        code, out, err = await run(server, *flags, "--json", str(result))
        too_much, _, _ = await run(server, *flags, "--at-least", str(most))
    assert (code, too_much) == (0, 1), err
    assert [part["arm"] for part in json.loads(result.read_text())["parts"]] == ["batched", "one at a time"]
    assert re.search(r"batched +one at a time +ratio", out)


async def test_refusals_are_counted_by_name() -> None:
    refused: list[Body] = []

    def every_second(body: Body) -> int:
        refused.append(body)
        return 429 if len(refused) % 2 == 0 else 200

    async with FakeServer(status=every_second) as server:
        code, out, _ = await run(server, "--users", "4")
    assert code == 0
    assert "HTTP 429 rate_limit_exceeded" in out and re.search(r"WARNING: load, interactive: \d+ of \d+ failed", out)


async def test_a_server_that_knows_only_openais_fields_is_measured() -> None:
    async with FakeServer(status=lambda body: 400 if "ignore_eos" in body else 200) as server:
        code, _, err = await run(server, "--users", "2")
    assert code == 0, err
    measured = server.requests[2:]
    assert measured and all(body["stream_options"] == {"include_usage": True} for body in measured)


async def test_a_server_that_cannot_be_measured_is_one_sentence() -> None:
    async def not_found(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n<p>\nno\n</p>"[:-3])
        writer.close()

    async with (
        await asyncio.start_server(not_found, "127.0.0.1", 0) as files,
        FakeServer(status=lambda body: 404) as unknown_model,
        FakeServer(status=lambda body: 401) as locked,
        FakeServer(streams=False) as whole_only,
    ):
        said = [
            await loadtest("run", "--url", f"http://127.0.0.1:{files.sockets[0].getsockname()[1]}", *SHORT),
            await run(unknown_model, "--model", "nothing"),
            await run(locked),
            await run(whole_only),
        ]
    sentences = ("base URL of an OpenAI-compatible server?", "HTTP 404", "TIDEGATE_API_KEY", "--no-stream")
    for (code, out, err), sentence in zip(said, sentences, strict=True):
        assert (code, out) == (2, ""), err
        assert sentence in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.full
async def test_a_server_that_goes_is_reported_by_name_after_ctrl_c() -> None:
    command = [sys.executable, "-m", "loadtest", "run", "--users", "3", "--duration", "600", "--warm-up", "0"]
    async with FakeServer() as server:
        process = await asyncio.create_subprocess_exec(
            *command, "--url", server.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        async with asyncio.timeout(100):
            while len(server.requests) < 20:
                await asyncio.sleep(0.01)
            await server.hang_up()
            while not re.search(rb" [1-9]\d* errors", await process.stderr.readline()):
                assert process.returncode is None
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    assert process.returncode == 130, err.decode()
    assert b"the measurement was interrupted" in out and b"requests finished" in out
    assert b"cannot connect" in out and b"Traceback" not in err


@pytest.mark.full
async def test_ctrl_c_during_the_warm_up_is_one_sentence() -> None:
    async with FakeServer() as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "loadtest", "run", "--users", "3", "--warm-up", "600", "--url", server.url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(100):
            while len(server.requests) < 20:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert err.splitlines()[-1] == b"loadtest: interrupted before anything was measured"


@pytest.mark.full
async def test_a_terminal_shows_a_live_table() -> None:
    ours, theirs = pty.openpty()
    try:
        async with FakeServer() as server:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loadtest", "run", "--url", server.url, "--users", "2", *SHORT),
                stdout=asyncio.subprocess.PIPE,
                stderr=theirs,
                env=os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
            )
            await process.communicate()
        os.set_blocking(ours, False)
        screen = os.read(ours, 2**16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    assert "TTFT p50" in screen and "interactive" in screen and "Ctrl-C" in screen


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--users", "0"], "run: nothing to send"),
        (["--at-least", "3"], "run: --at-least needs --compare"),
        (["--compare", "speed"], "run --compare: Input should be 'tiers' or 'batching'"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["run", *flags])
    assert exit_info.value.code == 2 and f"loadtest: {sentence}" in capsys.readouterr().err


def test_a_page_without_matplotlib_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> None:
        raise MissingExtra("--html needs matplotlib: pip install 'tidegate[loadtest]'")

    monkeypatch.setattr(run_command, "require", missing)
    with pytest.raises(SystemExit) as exit_info:
        main(["run", "--url", "http://127.0.0.1:9", "--html", "r.html"])
    assert exit_info.value.code == 2 and "pip install" in capsys.readouterr().err
