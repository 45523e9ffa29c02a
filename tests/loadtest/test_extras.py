"""What is not installed is said before a run begins, in one sentence, and a command's mistakes likewise."""

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from loadtest import extras
from loadtest.__main__ import main
from loadtest.extras import LOCUST, PLOTS, MissingExtra, require
from loadtest.running import one_sentence


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the extra."""

    def find(name: str) -> ModuleSpec | None:
        return None if name in (*LOCUST, "psutil") else importlib.util.find_spec(name)

    monkeypatch.setattr(extras, "find_spec", find)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        (["growth"], "matplotlib"),
        (["calibrate", "--plot", "fit.png"], "matplotlib"),
        (["locust"], "locust and matplotlib"),
        (["coserve", "--report", "page"], "matplotlib"),
        (["soak"], "psutil"),
    ],
)
def test_what_is_missing_is_said_before_anything_runs(
    arguments: list[str], packages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    said = capsys.readouterr()
    assert exit_info.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert f"needs {packages}: " in said.err and "pip install 'tidegate[loadtest]'" in said.err


@pytest.mark.usefixtures("bare")
def test_only_what_is_missing_is_named() -> None:
    with pytest.raises(MissingExtra, match="--plot needs matplotlib: "):
        require((*PLOTS, "json"), "--plot")
    require(("json",), "nothing")


def test_reports_without_plots_need_no_plotting_library() -> None:
    """Modules that every run imports: with them alone, matplotlib is not loaded."""
    program = (
        "import loadtest.__main__, loadtest.calibration.report, bench.isolation.conduct, sys\n"
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_flags_that_mean_nothing_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["coserve", "--seed", "-1", "--search-budget", "soon"])
    said = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and len(said) == 2
    assert any(line.startswith("loadtest: coserve --search-budget: ") for line in said)


def test_a_store_that_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for url, sentence in ((f"unix://{tmp_path}/no.sock", "no.sock"), ("ftp://store", "redis://")):
        with pytest.raises(SystemExit) as exit_info:
            main(["queue", "--redis-url", url, "--requests", "64"])
        said = capsys.readouterr().err
        assert exit_info.value.code == 2 and said.startswith("queue: ") and said.count("\n") == 1 and sentence in said


def test_only_the_errors_that_were_named_become_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), one_sentence(ValueError, said_by="me"):
        raise ValueError("mend it")
    assert capsys.readouterr().err == "me: mend it\n"
    with pytest.raises(KeyError), one_sentence(ValueError):
        raise KeyError("a defect")


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    about, _, listed = capsys.readouterr().out.partition("subcommands:")
    commands = [line.split()[0] for line in listed.splitlines()[2:] if line.strip()]
    assert len(commands) == 13 and all(f" {command}: " in about.replace("\n", " ") for command in commands)
