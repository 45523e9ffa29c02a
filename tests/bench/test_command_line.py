"""The command line of the laboratory: its commands, and mistakes in one sentence."""

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from bench.__main__ import main
from loadtest import running
from loadtest.running import PLOTS, PROCESSES


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the packages of the extra."""

    def find(name: str) -> ModuleSpec | None:
        return None if name in (*PLOTS, *PROCESSES) else importlib.util.find_spec(name)

    monkeypatch.setattr(running, "find_spec", find)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that the command writes to stderr before it exits with code 2, having written nothing else."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    said = capsys.readouterr()
    assert (exit_info.value.code, said.out) == (2, "")
    return said.err.splitlines()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("arguments", "packages"),
    [
        (["isolation", "--report", "page"], "matplotlib"),
        (["closed-loops"], "psutil"),
    ],
)
def test_a_missing_package_is_named_before_anything_runs(
    arguments: list[str], packages: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = refused(capsys, *arguments)
    assert f"needs {packages}: " in line and "pip install 'tidegate[loadtest]'" in line


@pytest.mark.full
def test_the_commands_load_no_optional_package() -> None:
    # redis-py imports OpenTelemetry's SDK if it is there, which imports psutil.
    without, loaded = "sys.modules['opentelemetry.sdk'] = None", "{'matplotlib', 'psutil'} & set(sys.modules)"
    program = f"import sys; {without}\nimport bench.__main__, bench.isolation.run\nsys.exit(len({loaded}))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    about, _, listed = capsys.readouterr().out.partition("subcommands:")
    commands = [line.split()[0] for line in listed.splitlines()[2:] if line.strip()]
    assert len(commands) == 14 and all(f" {command}: " in about.replace("\n", " ") for command in commands)
