"""The commands, run as a user runs them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from loadtest.__main__ import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command quietens the log of its own process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    code = 0
    try:
        main(["simulate", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def write_trace(path: Path, count: int, gap_s: float) -> str:
    rows = ({"arrival_s": i * gap_s, "tier": "default", "prompt_tokens": 64, "output_tokens": 4} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_trace_is_simulated_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = write_trace(tmp_path / "trace.jsonl", 20, 0.5), tmp_path / "out" / "run.json"
    code, printed, _ = simulate(capsys, "--trace", trace, "--duration", "10", "--json", str(out))
    assert code == 0
    assert "realtime TTFT p99: " in printed and printed.count("kept\n") == 2
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["summary"]["classes"]["realtime"]["done"] == 20
    assert [s["at_s"] for s in written["seconds"]][:3] == [1.0, 2.0, 3.0]
    assert sum(s["classes"]["realtime"]["offered"] for s in written["seconds"][:10]) == 20
    assert {"batch_size", "max_wait_s", "queued", "held"} <= set(written["seconds"][0]["tiers"]["realtime"])


def test_the_fewest_workers_for_a_trace_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 300, 0.02)
    code, printed, progress = simulate(capsys, "--trace", trace, "--duration", "6", "--workers", "auto")
    assert code == 0
    assert "workers 1: not all SLOs kept" in progress
    probed = [line.split() for line in printed.split("\n\n")[1].splitlines()[2:]]
    kept = [int(line[0]) for line in probed if "kept" in line]
    missed = [int(line[0]) for line in probed if "missed" in line]
    assert max(missed) + 1 == min(kept)
    assert f"on {min(kept)} x 135m-cpu" in printed


def test_the_highest_rate_of_a_trace_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 10, 0.4)
    code, printed, _ = simulate(capsys, "--trace", trace, "--duration", "4", "--find-capacity", "rate")
    assert code == 0
    assert "times the clients on 1 x 135m-cpu" in printed


def test_bulk_gets_more_where_answers_may_take_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "frontier.json"
    code, printed, _ = simulate(
        capsys, "--scenario", "peers", "--duration", "40", "--max-slowdown", "1.05,2", "--json", str(out)
    )
    assert code == 0 and "÷ limit" in printed
    found = json.loads(out.read_text(encoding="utf-8"))["frontier"]
    strict, loose = found["points"]
    assert (strict["max_slowdown"], loose["max_slowdown"]) == (1.05, 2.0)
    assert strict["slowdown"] < 1.15 < loose["slowdown"]
    assert 0.6 * strict["limit"] < strict["harvest"] < loose["harvest"] < loose["limit"] < 1
    assert 0.4 < found["busy_share"] < 0.6 and 1 < found["gain"] < 1.3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scenario", "short-chats", "--duration", "1", "--max-slowdown", "1.25"), "and with bulk"),
        (("--max-slowdown", "0.5"), "values from 1"),
        (("--max-slowdown", "1.25", "--workers", "1-3"), "a number of --workers"),
        (("--model-shape", "no-such"), "shipped cards: "),
        (("--scenario", "no-such"), "shipped scenarios: "),
        (("--tiers", "no-such.yaml"), "no-such.yaml"),
        (("--trace", "no-such.jsonl"), "no-such.jsonl"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, _, error = simulate(capsys, *arguments)
    assert code == 2
    assert said in error and error.count("\n") == 1


def test_tidegate_simulate_prints_the_same_whatever_the_interpreters_hash_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--duration", "8", "--seed", "3")
    with subprocess.Popen(
        [sys.executable, "-c", "from tidegate.cli import main; main()", "simulate", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as other:
        printed_here = simulate(capsys, *arguments)[1]  # meanwhile
        printed_there, error = other.communicate(timeout=60)
    assert other.returncode == 0, error
    assert printed_there == printed_here != ""
