"""The busy neighbour: its processes end, chats belong to phases, and the time until a server is back to normal."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bench.peers.commands import BusyNeighbour
from bench.peers.neighbour import BUSY_LOOP, CHAT, NeighbourPart, busy_loops, recovery_s, summarize_neighbour
from bench.peers.neighbour_report import neighbour_goals
from bench.peers.processes import tree_cpu_s
from loadtest.client.answer import Outcome
from loadtest.client.http import TargetError
from loadtest.client.runner import ArmRun
from tests.loadtest.fake_server import FakeServer


def quick(**flags: object) -> BusyNeighbour:
    """The command with phases that measure nothing."""
    phases = {"before": 0.3, "busy": 0.3, "after": 0.3, "rounds": 1, "settle": 0, "drain": 2, "rate": 40}
    return BusyNeighbour.model_validate({**phases, **flags})


async def test_all_arms_get_the_same_chats_and_share_no_prefix_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_file = tmp_path / "neighbour.json"
    async with FakeServer() as ours, FakeServer() as vllm:
        await quick(url=ours.url, peer_url=vllm.url, loops=1, json=result_file).measure()
    result = json.loads(result_file.read_text())
    due = {part["arm"]: [chat["due_s"] for chat in part["chats"]] for part in result["parts"]}
    assert due["default"] == due["flex"] == due["vllm"] and len(due["vllm"]) > 3
    salts = {arm: f"neighbour-{arm}-0-1" for arm in due}
    bodies = {arm: [b for b in ours.requests + vllm.requests if b["cache_salt"] == salts[arm]] for arm in due}
    assert [b["prompt"] for b in bodies["default"]] == [b["prompt"] for b in bodies["vllm"]]
    assert {b.get("service_tier") for b in bodies["flex"]} == {"flex"}
    assert {b.get("service_tier") for b in bodies["vllm"]} == {None}
    assert all(part["neighbour_to_s"] - part["neighbour_from_s"] > 0.29 for part in result["parts"])
    assert "flex: first token p99 beside the busy loops" in capsys.readouterr().out


async def test_the_load_can_be_a_share_of_what_the_slowest_arm_completes(tmp_path: Path) -> None:
    result_file = tmp_path / "neighbour.json"
    async with FakeServer() as server:
        flags = {"arms": "flex", "load": 0.05, "loops": 0, "json": result_file}
        await quick(url=server.url, **flags).measure()
    loops = [body for body in server.requests if "cache_salt" not in body]
    assert len(loops) == 32 + 32 * 3  # one request a stream to warm up, then three
    assert json.loads(result_file.read_text())["load"]["chats_per_s"] > 0


async def test_a_server_that_serves_nothing_ends_the_command() -> None:
    async with FakeServer(status=lambda body: 400) as server:
        with pytest.raises(TargetError, match="default: no chat was served"):
            await quick(url=server.url, arms="default", loops=0).measure()


async def test_busy_loops_are_busy_and_end_with_their_block() -> None:
    with suppress(RuntimeError):
        async with busy_loops(2, 60.0) as processes:
            while any(tree_cpu_s(process.pid) < 0.05 for process in processes):
                assert all(process.poll() is None for process in processes)
            raise RuntimeError("the block fails")
    assert len(processes) == 2 and all(process.returncode is not None for process in processes)


def test_a_busy_loop_ends_by_itself() -> None:
    assert subprocess.run([sys.executable, "-S", "-c", BUSY_LOOP, "0.05"], check=False, timeout=60).returncode == 0


def part(ttfts: dict[float, float], failed: tuple[float, ...] = (), arm: str = "default") -> NeighbourPart:
    """A part of 30 s with a neighbour from 10 to 15 s, and chats due at some seconds with some first token times."""
    chats = []
    for i, (due_s, ttft_s) in enumerate(ttfts.items()):
        outcome = Outcome(CHAT, i, due_s=100.0 + due_s)
        if due_s in failed:
            outcome.error = "HTTP 503"
        else:
            outcome.progress, outcome.finished_s = [(outcome.due_s + ttft_s, 1)], outcome.due_s + ttft_s
        chats.append(outcome)
    run = ArmRun(100.0, 30.0, {CHAT: chats})
    return NeighbourPart(arm, 0, run, 110.0, 115.0, None)


def test_a_chat_belongs_to_the_phase_in_which_it_was_due() -> None:
    (summary,) = summarize_neighbour([part({1.0: 0.1, 9.9: 0.2, 10.0: 3.0, 14.9: 4.0, 15.0: 0.3, 29.0: 0.4})])
    phases = [summary.before, summary.during, summary.after]
    assert [sorted(round(float(s), 3) for s in phase.samples) for phase in phases] == [
        [0.1, 0.2],
        [3.0, 4.0],
        [0.3, 0.4],
    ]
    (goal,) = neighbour_goals([summary])
    assert goal.verdict == "missed"


def test_a_server_is_normal_with_the_first_window_in_which_no_chat_is_slow_or_failed() -> None:
    slow_then_fine = {16.0: 2.0, 17.0: 0.1, 21.0: 0.1, 26.0: 0.1}
    assert recovery_s(part(slow_then_fine), 0.15) == 5.0
    assert recovery_s(part(slow_then_fine, failed=(21.0,)), 0.15) == 10.0
    assert recovery_s(part({16.0: 0.1}), 0.15) == 0.0
    assert recovery_s(part({26.0: 0.1}), 0.15) == 10.0  # windows without chats say nothing
    assert recovery_s(part({16.0: 2.0, 21.0: 2.0, 26.0: 2.0}), 0.15) is None


def test_a_round_that_does_not_recover_is_not_hidden_by_one_that_does() -> None:
    before = {1.0: 0.1}
    (summary,) = summarize_neighbour([part({**before, 16.0: 0.1}), part({**before, 16.0: 9.0})])
    assert summary.recovery_s == (0.0, None) and summary.longest_recovery_s is None


def test_the_goal_does_not_count_where_chats_failed() -> None:
    (refusing,) = summarize_neighbour([part({1.0: 0.1, 11.0: 0.2, 12.0: 0.2}, failed=(12.0,))])
    (goal,) = neighbour_goals([refusing])
    assert (goal.verdict, goal.note) == ("does not count", "of 1 chats; 1 failed")
    assert neighbour_goals(summarize_neighbour([part({11.0: 0.2}, arm="vllm")])) == []
