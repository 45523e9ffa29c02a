"""`tidegate keys`: what it prints, and what it leaves in the file."""

import hashlib
from pathlib import Path

import pytest

from gateway.keys.file import read_entries
from tidegate.cli import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["keys", *args])
    return int(ended.value.code or 0)


def test_a_key_is_printed_once_listed_and_revoked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tier", "realtime", "--tier", "bulk", "--default-tier", "bulk", "--requests-per-minute", "60"]
    assert run("add", "chat-ui", "--file", str(path), *flags) == 0
    secret = capsys.readouterr().out.strip()
    [entry] = read_entries(path)
    assert entry.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert run("list", "--file", str(path)) == 0
    listed = capsys.readouterr().out
    assert f"chat-ui  {entry.id}  tiers=realtime,bulk default_tier=bulk requests_per_minute=60" in listed
    assert secret not in listed + path.read_text()
    assert run("revoke", "chat-ui", "--file", str(path)) == 0
    assert capsys.readouterr().out == f"revoked: chat-ui {entry.id}\n"
    assert read_entries(path) == []


def test_the_secret_of_a_webhook_is_not_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo="
    path.write_text(f"keys: [{{name: a, key: b, webhook: {{secret: {secret}, url: 'https://example.com/hook'}}}}]")
    assert run("list", "--file", str(path)) == 0
    listed = capsys.readouterr().out
    assert "webhook=https://example.com/hook" in listed and secret not in listed


def test_the_file_comes_from_the_environment_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_API_KEYS", str(path))
    assert run("add", "a", "--admin") == 0
    assert run("add", "a", "--rotate") == 0
    assert [(entry.name, entry.admin) for entry in read_entries(path)] == [("a", True)] * 2


def test_tiers_are_those_of_the_tiers_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("add", "a", "--file", str(path), "--tier", "gold") == 1
    assert "there is no tier 'gold'" in capsys.readouterr().err
    tiers = tmp_path / "tiers.yaml"
    tiers.write_text("{default_tier: gold, batch_tier: gold, tiers: {gold: {priority: 1}}}")
    assert run("add", "a", "--file", str(path), "--tier", "gold", "--tiers-file", str(tiers)) == 0


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["list"], 2, "--file FILE"),
        (["add", "a", "--file", "{}", "--rotate", "--admin"], 1, "--rotate keeps the options"),
        (["add", "a", "--file", "{}", "--requests-per-minute", "0"], 1, "requests_per_minute"),
        (["revoke", "a", "--file", "{}"], 1, "no key with the name or id 'a'"),
        (["list", "--file", "{}"], 1, "No such file"),
        (["add", "a", "--file", "/nowhere/keys.yaml"], 1, "No such file"),
    ],
)
def test_a_mistake_is_one_sentence(
    path: Path, args: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(arg.format(path) for arg in args)) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
