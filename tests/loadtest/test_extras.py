"""Missing packages, wrong flags and moved commands end a run before it begins, each with one sentence."""

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from loadtest import running
from loadtest.__main__ import MOVED, main
from loadtest.running import PLOTS, PROCESSES, one_sentence


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the extra."""

    def find(name: str) -> ModuleSpec | None:
        return None if name in (*PLOTS, *PROCESSES) else importlib.util.find_spec(name)

    monkeypatch.setattr(running, "find_spec", find)


@pytest.mark.usefixtures("bare")
def test_a_missing_package_is_named_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["calibrate", "--plot", "fit.png"])
    said = capsys.readouterr()
    assert exit_info.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert "needs matplotlib: " in said.err and "pip install 'tidegate[loadtest]'" in said.err


def test_reports_without_plots_need_no_plotting_library() -> None:
    """Modules that every run imports: with them alone, matplotlib is not loaded."""
    program = "import loadtest.__main__, loadtest.calibration.report, sys\nsys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_each_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["mixed", "--seed", "-1", "--duration", "soon"])
    said = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and len(said) == 2
    assert any(line.startswith("loadtest: mixed --duration: ") for line in said)


@pytest.mark.parametrize("command", MOVED)
def test_a_command_that_moved_names_its_new_place(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--any", "flag"])
    said = capsys.readouterr()
    assert (exit_info.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"has moved: run {MOVED[command]}" in said.err


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
    assert len(commands) == 6 and all(f" {command}: " in about.replace("\n", " ") for command in commands)
