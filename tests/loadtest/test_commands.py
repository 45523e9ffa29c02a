"""The commands, run as a user runs them, against a fake server."""

import asyncio
import io
import json
import shlex
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from loadtest.__main__ import main
from loadtest.checks.mixed import BULK, INTERACTIVE, MIXED, run_mixed
from loadtest.checks.report import mixed_record
from loadtest.client.http import parse_target
from loadtest.client.runner import Timing
from loadtest.model_shapes import write_dummy_model
from loadtest.reporting.record import Provenance, Record, Table
from loadtest.reporting.writers import render_table, render_text, write_json
from loadtest.traffic.scenario import Scenario
from tests.loadtest.fake_server import Body, FakeServer, repeat_or_count

LENGTHS = {"prompt_tokens": 4, "output_tokens": 3}
SMALL = Scenario.model_validate(
    {
        "classes": {
            "chat": {"role": "interactive", "arrivals": {"rate_per_s": 40}, **LENGTHS},
            "backlog": {"role": "bulk", "arrivals": {"streams": 2}, **LENGTHS},
        }
    }
)


async def loadtest(*args: str) -> tuple[int, str, str]:
    """Run a command on a thread of this process. Return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()

    def command() -> int:
        try:
            main(args)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "orig_argv", ["python", "-m", "loadtest", *args]),
        patch("loadtest.measure.command.ends_on_sigterm", nullcontext),  # signals are the main thread's
        patch.object(asyncio.SelectorEventLoop, "add_signal_handler"),
    ):
        return await asyncio.to_thread(command), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("command", ["", "run", "simulate"])
async def test_the_help_names_the_command_that_users_type(command: str) -> None:
    code, out, _ = await loadtest(*filter(None, [command, "--help"]))
    assert code == 0 and out.startswith(f"usage: tidegate loadtest {command}")
    text = out.partition("\n\n")[2].partition("options:")[0]
    assert len(text.splitlines()) > 2 and not [line for line in text.splitlines() if line.startswith(" ")]


async def test_nonces_that_all_come_back_exit_0_and_are_in_the_json(tmp_path: Path) -> None:
    result = tmp_path / "results" / "nonce.json"
    async with FakeServer() as server:
        code, out, err = await loadtest("nonce", "--url", server.url, "--requests", "16", "--json", str(result))
    assert code == 0, err
    assert "16 of 16 right: every answer is its own nonce" in out
    written = json.loads(result.read_text())
    assert written["right"] == {"default": 8, "flex": 8}
    assert written["answered_as"] == {"default": ["default"], "flex": ["flex"]}
    assert written["hardware"] and written["date"] and "loadtest nonce" in written["command"]
    streamed = [(body["service_tier"], body["stream"]) for body in server.requests]
    assert all(streamed.count((tier, stream)) == 4 for tier in ("default", "flex") for stream in (True, False))


async def test_a_nonce_of_another_request_is_named_a_leak() -> None:
    seen: list[str] = []

    def mix_up(body: Body) -> list[str]:
        seen.append(repeat_or_count(body)[0] + repeat_or_count(body)[1])
        return [seen[0]]

    async with FakeServer(reply=mix_up) as server:
        code, out, _ = await loadtest("nonce", "--url", server.url, "--requests", "4")
    assert code == 1
    assert out.count("holds the nonce of another request") == 3
    assert "1 of 4 right: 3 WRONG answers, 3 with another request's nonce" in out


async def test_mixed_measures_three_arms_and_relates_them() -> None:
    progress: list[str] = []
    async with FakeServer() as server:
        result = await run_mixed(
            parse_target(server.url), SMALL, Timing(0.5, 2, lead_s=0.1, settle_s=0.0), 1, progress.append
        )
    assert list(result.summaries) == [INTERACTIVE, BULK, MIXED]
    alone, mixed = result.summaries[INTERACTIVE]["chat"], result.summaries[MIXED]["chat"]
    assert alone.offered == mixed.offered == alone.completed == mixed.completed > 0
    assert result.isolation["chat"].ttft_p50 is not None
    assert result.bulk_kept is not None and result.bulk_kept > 0
    assert all(share is not None and share > 0 for share in result.busy_share.values())
    assert result.has_answers and len(progress) == 6


async def test_interactive_requests_without_an_end_are_counted_and_warned_of() -> None:
    classes = SMALL.classes | {"chat": SMALL.classes["chat"].model_copy(update={"service_tier": "default"})}
    timing = Timing(0.2, 1, lead_s=0.1, settle_s=0.0, drain_s=0.1)
    async with FakeServer(is_silent=lambda body: body.get("service_tier") == "default") as server:
        scenario = SMALL.model_copy(update={"classes": classes})
        result = await run_mixed(parse_target(server.url), scenario, timing, 1, lambda _: None)
    chat = result.summaries[MIXED]["chat"]
    assert chat.unfinished == chat.offered > 0 and chat.errors == chat.completed == 0
    assert chat.answered == 0 and not result.has_answers
    shortest = chat.ttft.samples.min()
    assert shortest >= timing.drain_s and chat.e2e.samples.min() == shortest
    text = render_text(mixed_record(result, {}, Provenance.of_this_run("m", 1)))
    assert f"WARNING: mixed, chat: {chat.offered} of {chat.offered} had no end" in text
    assert "unfinished" in text.splitlines()[1] and "bulk alone, backlog" not in text


async def test_mixed_as_a_command_writes_its_table_and_says_what_failed(tmp_path: Path) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(json.dumps({"classes": json.loads(SMALL.model_dump_json(exclude_none=True))["classes"]}))
    async with FakeServer(status=lambda body: 429) as server:
        code, out, err = await loadtest(
            "mixed",
            "--url",
            server.url,
            "--scenario",
            str(scenario),
            "--duration",
            "0.2",
            "--rounds",
            "1",
            "--lead",
            "0.1",
        )
    assert code == 1, err
    assert "WARNING: interactive alone, chat: " in out and "WARNING: bulk alone, backlog: 2 of 2" in out
    assert "rate_limit_exceeded" in out


async def test_a_users_mistake_is_one_sentence_and_exit_2() -> None:
    async with FakeServer() as server:
        pass
    mistakes = [
        (["nonce", "--url", server.url], "/v1/models: "),
        (["nonce", "--url", "http://example.com"], "--allow-remote"),
        (["mixed", "--url", server.url, "--scenario", "nothing.yaml"], "shipped scenarios: "),
    ]
    for args, sentence in mistakes:
        code, out, err = await loadtest(*args)
        assert (code, out) == (2, ""), err
        assert err.count("\n") == 1 and sentence in err


def test_the_dummy_model_is_the_reference_shape(tmp_path: Path) -> None:
    config = json.loads(write_dummy_model(tmp_path / "shape").read_text())
    hidden, layers, heads, kv_heads = 576, 30, 9, 3
    attention = hidden * hidden * 2 + 2 * hidden * config["head_dim"] * kv_heads
    layer = attention + 3 * hidden * config["intermediate_size"] + 2 * hidden
    parameters = config["vocab_size"] * hidden + layers * layer + hidden
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (layers, heads)
    assert 134e6 < parameters < 136e6


def test_the_command_line_in_a_result_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["/usr/bin/python3", "-m", "loadtest", "mixed", "--scenario", "my load.yaml", "--model", "it's"]
    monkeypatch.setattr(sys, "orig_argv", line)
    write_json(tmp_path / "r.json", Record(provenance=Provenance.of_this_run("m", 1)))
    command = json.loads((tmp_path / "r.json").read_text())["command"]
    assert shlex.split(command) == ["python3", *line[1:]]


def test_tables_align_words_left_and_numbers_right() -> None:
    table = Table.of(("way", "n"), [("one", "5"), ("three", "12")])
    assert render_table(table) == "way     n\n─────  ──\none     5\nthree  12"
