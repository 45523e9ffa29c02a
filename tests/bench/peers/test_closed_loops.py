"""Closed loops against servers that answer at once, and the goals for known times."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from bench.peers.arms import Servers
from bench.peers.closed_loops import LoopPart, Loops
from bench.peers.closed_loops_report import loop_goals, loops_record
from bench.peers.command import ClosedLoops
from bench.peers.idle_servers import CpuMeter, tree_cpu_s
from loadtest.client.answer import Outcome
from loadtest.client.http import Target, TargetError
from loadtest.reporting.writers import render_text
from loadtest.serving import Server
from tests.loadtest.fake_server import Body, FakeServer

LOOPS = Loops((2, 4), 3, (4, 9), 5, rounds=2, settle_s=0.0, seed=1)


def quick(**flags: object) -> ClosedLoops:
    """The command with a load that measures nothing."""
    load = {"streams": "2,4", "requests_per_stream": 3, "prompt_tokens": "4-9", "new_tokens": 5, "settle": 0}
    return ClosedLoops.model_validate({**load, **flags})


async def test_all_arms_send_the_same_lengths_and_other_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file = tmp_path / "loops.json"
    async with FakeServer() as ours, FakeServer() as vllm:
        await quick(url=ours.url, peer_url=vllm.url, rounds=2, json=result_file).measure()
    result = json.loads(result_file.read_text())
    measured = [(s["streams"], s["arm"], s["offered"], s["errors"]) for s in result["summaries"]]
    expected = [(n, arm, 2 * 3 * n, 0) for n in (2, 4) for arm in ("default", "flex", "vllm")]
    assert sorted(measured) == expected
    sent = {
        "default": [b for b in ours.requests if b["service_tier"] == "default"],
        "flex": [b for b in ours.requests if b["service_tier"] == "flex"],
        "vllm": vllm.requests,
    }
    assert all("service_tier" not in body for body in vllm.requests)
    lengths = {arm: sorted(len(body["prompt"]) for body in bodies) for arm, bodies in sent.items()}
    assert lengths["default"] == lengths["flex"] == lengths["vllm"]
    prompts = [tuple(body["prompt"]) for bodies in sent.values() for body in bodies]
    assert len(set(prompts)) == len(prompts)
    out = capsys.readouterr().out
    assert "default ÷ flex: tokens/s" in out and "flex: first token p99 ÷ vLLM" in out


async def test_a_stream_has_one_request_at_a_time() -> None:
    open_now, most = 0, 0

    class Counting(FakeServer):
        async def _generate(self, body: Body, writer: asyncio.StreamWriter) -> None:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            await super()._generate(body, writer)
            open_now -= 1

    async with Counting() as server:
        await quick(url=server.url, arms="flex", streams="3", rounds=1).measure()
    assert 1 <= most <= 3 and len(server.requests) == 3 * 3 + 3  # with one request a stream to warm up


async def test_failed_requests_are_counted_and_their_goals_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file = tmp_path / "loops.json"
    seen: list[Body] = []

    def status(body: Body) -> int:
        seen.append(body)
        return 503 if len(seen) % 4 == 0 else 200

    async with FakeServer(status=status) as ours, FakeServer() as vllm:
        flags = {"url": ours.url, "peer_url": vllm.url, "arms": "default,vllm", "rounds": 1, "json": result_file}
        await quick(**flags).measure()
    result = json.loads(result_file.read_text())
    errors = {s["arm"]: s["errors"] for s in result["summaries"] if s["streams"] == 4}
    assert errors["default"] > 0 == errors["vllm"]
    assert {goal["verdict"] for goal in result["goals"]} <= {"missed", "does not count"}
    assert "WARNING: default, 4 streams: " in capsys.readouterr().out


async def test_a_server_that_serves_nothing_ends_the_command() -> None:
    async with FakeServer(status=lambda body: 400) as server:
        with pytest.raises(TargetError, match="flex: no request was served"):
            await quick(url=server.url, arms="flex").measure()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"arms": "default,sglang"}, "there is no arm sglang"),
        ({"arms": " "}, "no arm"),
        ({"arms": "vllm"}, "needs --vllm-python or --peer-url"),
        ({"arms": "flex", "engine": "vllm"}, "--engine vllm needs --vllm-python"),
        ({"prompt_tokens": "256-32"}, "lower bound"),
        ({"prompt_tokens": "many"}, "not a range"),
        ({"streams": "8,901"}, "at most 900"),
    ],
)
async def test_a_users_mistake_is_one_sentence(flags: dict[str, str], sentence: str) -> None:
    with pytest.raises(TargetError, match=sentence):
        await quick(**flags).measure()


def part(arm: str, streams: int, tokens_per_s: float, ttft_s: float, round_: int = 0, cores: float = 0.0) -> LoopPart:
    """A part of ten requests of ten tokens, with the same first token time."""
    outcomes = []
    for i in range(10):
        outcome = Outcome("loop", i, due_s=0.0, finished_s=1.0, completion_tokens=10)
        outcome.progress = [(ttft_s, 1), (ttft_s + 0.1, 10)]
        outcomes.append(outcome)
    return LoopPart(arm, streams, round_, 100 / tokens_per_s, outcomes, 0.1, cores, was_quiet=True)


def verdicts(parts: Sequence[LoopPart], arms: Sequence[str]) -> dict[str, tuple[float | None, str]]:
    goals = loop_goals(parts, arms)
    return {g.name: (None if g.value is None else round(g.value, 3), g.verdict) for g in goals}


def test_a_goal_is_judged_by_the_worst_number_of_streams() -> None:
    parts = [
        *(part("default", 8, 120, 0.1), part("flex", 8, 125, 0.2), part("vllm", 8, 100, 0.2)),
        *(part("default", 64, 90, 0.4), part("flex", 64, 105, 0.22), part("vllm", 64, 100, 0.2)),
    ]
    assert verdicts(parts, ("default", "flex", "vllm")) == {
        "default: tokens/s ÷ vLLM": (0.9, "missed"),
        "default: first token p99 ÷ vLLM": (2.0, "missed"),
        "default: first token p50 ÷ vLLM": (2.0, "missed"),
        "flex: tokens/s ÷ vLLM": (1.05, "target"),
        "flex: first token p99 ÷ vLLM": (1.1, "target"),
        "flex: first token p50 ÷ vLLM": (1.1, "missed"),
        "default ÷ flex: tokens/s": (0.857, "missed"),
    }
    assert verdicts(parts[:3], ("default", "flex", "vllm"))["default: tokens/s ÷ vLLM"] == (1.2, "goal")
    assert list(verdicts(parts, ("default", "flex"))) == ["default ÷ flex: tokens/s"]


def test_a_server_that_is_not_idle_is_shown() -> None:
    busy = [part("flex", 8, 100, 0.1, cores=0.6), part("vllm", 8, 100, 0.1, cores=0.001)]
    record = loops_record(busy, LOOPS, ("flex", "vllm"))
    assert [w for w in record.warnings if "not idle" in w] == [
        "flex: the other servers used 0.60 cores while it was measured: they were not idle"
    ]
    assert "CPU cores used by the idle servers: at most 0.600, beside flex" in render_text(record)


def test_the_cpu_time_of_the_others_is_that_of_their_processes() -> None:
    own = psutil.Process()
    server = Server(Target("127.0.0.1", 1), own.pid)
    meter = CpuMeter([server])
    before_s = tree_cpu_s(own.pid)
    while tree_cpu_s(own.pid) < before_s + 0.1:
        sum(range(10_000))
    cores = meter.cores()
    assert cores is not None and cores > 0
    assert CpuMeter([Server(Target("127.0.0.1", 1))]).cores() is None
    assert Servers(server, None).others("flex") == []
