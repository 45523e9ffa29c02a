"""`--model FILE.gguf`: commands get the directory of what the file holds, and clients its name."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from engine import gguf
from engine.config import EngineStartError
from tidegate import cli
from tidegate.settings.base import CommonSettings

Unpacked = list[tuple[Path, bool]]


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unpacked:
    """The files that were unpacked, and whether with weights."""
    calls: Unpacked = []

    def unpack(file: Path, *, with_weights: bool) -> Path:
        calls.append((file, with_weights))
        return tmp_path / "unpacked"

    monkeypatch.setattr(gguf, "unpacked", unpack)
    return calls


def settings_of(command: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> CommonSettings:
    """Return the settings with which `command` would run."""
    seen: list[Any] = []

    def resolve(name: str) -> Any:
        return resolve_name(name) if "Settings" in name else lambda settings: seen.append(settings) or 0

    monkeypatch.setattr(cli, "resolve_name", resolve)
    with pytest.raises(SystemExit):
        cli.main([command, "--model", "/models/mine.Q8_0.gguf", *flags])
    settings: CommonSettings = seen[0]
    return settings


@pytest.mark.parametrize("command", ["serve", "worker", "gateway", "doctor", "demo"])
def test_every_command_takes_a_file(
    command: str, unpacked: Unpacked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = () if command in ("doctor", "demo") else ("--redis-url", "redis://localhost:1")
    settings = settings_of(command, monkeypatch, *store)
    assert unpacked == [(Path("/models/mine.Q8_0.gguf"), False)]
    assert settings.model_path == str(tmp_path / "unpacked")
    assert settings.model_names == ("mine.Q8_0",)
    flags = settings.flags(CommonSettings)  # what parts of `serve` get
    assert flags[flags.index("--model") + 1] == settings.model_path
    assert flags[flags.index("--served-model-name") + 1] == "mine.Q8_0"


def test_vllm_gets_unpacked_weights(unpacked: Unpacked, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_of("worker", monkeypatch, "--engine", "vllm", "--redis-url", "redis://localhost:1")
    assert unpacked == [(Path("/models/mine.Q8_0.gguf"), True)]


def test_weights_stay_packed_where_another_server_computes(unpacked: Unpacked, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = ("--engine", "openai", "--upstream", "http://localhost:1", "--redis-url", "redis://localhost:1")
    settings = settings_of("serve", monkeypatch, *upstream, "--served-model-name", "own")
    assert unpacked == [(Path("/models/mine.Q8_0.gguf"), False)]
    assert settings.model_names == ("own",)


def test_a_file_that_cannot_be_read_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: Path, *, with_weights: bool) -> Path:
        raise EngineStartError("it is damaged")

    monkeypatch.setattr(gguf, "unpacked", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--model", "x.gguf"])
    assert ended.value.code == 78
    assert "tidegate doctor: it is damaged" in capsys.readouterr().err
