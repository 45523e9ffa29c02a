"""The interleaved run and its report, with clients that only pretend to compute."""

import sys
from pathlib import Path

import pytest

from bench.engines.comparison import Comparison, Plan, compare
from bench.engines.comparison_report import ComparisonReport
from bench.engines.roofline import ModelShape, Peaks
from bench.engines.systems.client import SystemClient, SystemUnavailable, environment_of, vllm_environment
from bench.engines.systems.protocol import Done, Failed, Order, Ready, SystemSpec, decode, encode
from bench.engines.work import STEP_TOKENS, Job, WorkKind
from loadtest.machine import ROOT
from loadtest.reporting.writers import render_text

SPEC = SystemSpec("model", "bfloat16", "cpu", 1, 128, 4, 512, 16)
PLAN = Plan((WorkKind.DECODE, WorkKind.PREFILL), (1, 4), rounds=3, seed=1, vocab_size=100, is_quick=True)
SHAPE = ModelShape(4, 8, 1, 1, 1, 4, 10, 2)
PEAKS = Peaks(1e6, 1e6)


class Pretender(SystemClient):
    """Takes `token_s` for each token, and answers with the tokens' numbers, except at `differs_at`."""

    def __init__(self, name: str, token_s: float, breaks_after: int = 10**9, differs_at: int = 10**9) -> None:
        super().__init__(name, SPEC, Path("unused.log"))
        self.jobs: list[Job] = []
        self._token_s = token_s
        self._breaks_after = breaks_after
        self._differs_at = differs_at

    def start(self) -> None:
        self.settings = "pretends"

    def run(self, job: Job) -> Done:
        if len(self.jobs) >= self._breaks_after:
            raise SystemUnavailable("out of memory")
        self.jobs.append(job)
        tokens = [[i if i < self._differs_at else -1 for i in range(n)] for n in job.new_tokens]
        return Done(tokens, self._token_s * job.num_new_tokens, 0.1, 0.0)


def run(*clients: Pretender) -> Comparison:
    return compare(PLAN, clients, lambda line: None)


def test_nothing_new_begins_once_time_is_over() -> None:
    ours = Pretender("tidegate", 0.01)
    answers = iter([False, False, True])
    part = compare(PLAN, [ours], lambda line: None, lambda: next(answers))
    assert [(s.work, s.streams, s.round) for s in part.samples] == [
        (s.work, s.streams, s.round) for s in run(Pretender("tidegate", 0.01)).samples[:2]
    ]
    assert ComparisonReport(part, None, None).as_dict()["jobs"]


def test_the_table_has_every_system_kind_of_work_and_number_of_streams() -> None:
    result = ComparisonReport(run(Pretender("tidegate", 0.01), Pretender("vllm", 0.02)), SHAPE, PEAKS).as_dict()
    cells = {(row["work"], row["streams"], row["system"]) for row in result["jobs"]}
    assert cells == {(w, s, n) for w in ("decode", "prefill") for s in (1, 4) for n in ("tidegate", "vllm")}
    assert all(len(row["rounds"]) == 3 for row in result["jobs"])
    ratios = [row["ours_over_it"]["value"] for row in result["jobs"] if row["system"] == "vllm"]
    assert ratios == pytest.approx([2.0] * 4)
    assert all(row["share_of_roofline"] > 0 for row in result["jobs"])


def test_a_step_is_the_difference_of_two_jobs() -> None:
    result = ComparisonReport(run(Pretender("tidegate", 0.01)), None, None).as_dict()
    steps = {row["streams"]: row["step_s"]["value"] for row in result["steps"]}
    assert steps == pytest.approx({1: 0.01, 4: 0.04})  # 4 tokens a step
    assert STEP_TOKENS > 1 and all(row["share_of_roofline"] is None for row in result["steps"])


def test_a_system_that_fails_leaves_with_its_reason_and_the_others_go_on() -> None:
    noted = run(Pretender("tidegate", 0.01), Pretender("vllm", 0.01, breaks_after=6))
    assert noted.unavailable == {"vllm": "out of memory"}
    assert sum(s.system == "tidegate" for s in noted.samples) == 3 * 4
    report = ComparisonReport(noted, SHAPE, PEAKS)
    assert "NOT MEASURED: vllm: out of memory" in render_text(report.record())


def test_without_ours_there_is_no_ratio_and_still_a_table() -> None:
    noted = run(Pretender("tidegate", 0.01, breaks_after=0), Pretender("vllm", 0.01))
    rows = ComparisonReport(noted, SHAPE, PEAKS).as_dict()["jobs"]
    assert rows and all(row["ours_over_it"] is None for row in rows)


@pytest.mark.parametrize("message", [SPEC, Order([[1, 2]], [3]), Ready("x"), Done([[1]], 0.5, 0.1, 0.0), Failed("no")])
def test_messages_survive_the_pipe(message: SystemSpec | Order | Ready | Done | Failed) -> None:
    line = encode(message)
    assert "\n" not in line and decode(line) == message


@pytest.mark.parametrize("line", ["", "{}", '{"kind": "Order"}', '{"kind": "Bomb"}', "[1]"])
def test_what_is_no_message_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_a_system_that_is_not_there_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    with SystemClient("vllm", SPEC, tmp_path / "vllm.log") as client:
        with pytest.raises(SystemUnavailable, match="No module named 'vllm'"):
            client.start()
        with pytest.raises(SystemUnavailable):
            client.run(Job(((1,),), (1,)))


def test_an_interpreter_that_is_not_there_and_one_that_dies(tmp_path: Path) -> None:
    missing = SystemClient("vllm", SPEC, tmp_path / "a.log", str(tmp_path / "python"))
    with missing, pytest.raises(SystemUnavailable, match="does not start"):
        missing.start()
    dying = tmp_path / "dies"
    dying.write_text(f"#!{sys.executable}\nimport sys; sys.exit('no such luck')\n")
    dying.chmod(0o755)
    gone = SystemClient("vllm", SPEC, tmp_path / "b.log", str(dying))
    with gone, pytest.raises(SystemUnavailable, match="no such luck"):
        gone.start()


def test_vllm_does_not_see_the_packages_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/this/python")
    server, offline, ours = vllm_environment(2, "3"), environment_of("vllm", SPEC), environment_of("tidegate", SPEC)
    assert "PYTHONPATH" not in server and offline["PYTHONPATH"] == str(ROOT)
    assert "/of/this/python" in ours["PYTHONPATH"] and str(ROOT) in ours["PYTHONPATH"]
    assert (server["OMP_NUM_THREADS"], server["VLLM_CPU_KVCACHE_SPACE"]) == ("2", "3")
    assert {env["OMP_NUM_THREADS"] for env in (offline, ours)} == {"1"}
    assert server["PATH"] == ours["PATH"]
