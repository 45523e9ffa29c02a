"""The command line: help texts, and messages for mistakes."""

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.system.server import run_to_end
from tidegate import cli
from tidegate.settings.base import CONFIG_VARIABLE

TIERS = """\
default_tier: a
batch_tier: a
tiers:
  a: {priority: 1, batch_size: {min: 1, start: 0, max: 8}}
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, ["serve"]),
        (["nothing"], 2, ["'nothing'"]),
        (["--version"], 0, [f"tidegate {version('tidegate')}\n"]),
        *(
            ([name, "--help"], 0, [f"usage: tidegate {name}", "--model", "--config"])
            for name in ("serve", "gateway", "worker", "demo", "backup", "restore")
        ),
        (["gateway"], 2, ["--redis-url"]),
        (["gateway", "--redis-url", "http://x"], 2, ["tidegate gateway: --redis-url: the URL of a store begins with"]),
        (["backup"], 2, ["DIRECTORY"]),
        (["restore", "{}/none", "--data-dir", "{}/data"], 78, ["no complete backup: backup.json is missing"]),
        (["worker"], 2, ["--redis-url"]),
        (["serve", "--port", "abc", "--load-format", "x"], 2, ["--port", "--load-format"]),
        (["serve", "--config", "{}/tidegate.yaml"], 2, ["prot"]),
        (["serve", "--config", "{}/none.yaml"], 2, ["none.yaml: No such file or directory\n"]),
        (["serve", "--config", "{}/list.yaml"], 2, ["list.yaml: must have the form `port: 8000`"]),
        (["serve", "--config", "{}/broken.yaml"], 2, ["broken.yaml: not YAML: line 2\n"]),
        (["serve", "--config", "{}/latin.yaml"], 2, ["latin.yaml: not UTF-8"]),
        (["serve", "--tiers", "{}/latin.yaml", "--data-dir", "{}/data"], 78, ["latin.yaml: not UTF-8"]),
        (["serve", "--models", "{}/latin.yaml", "--data-dir", "{}/data"], 78, ["latin.yaml: not UTF-8"]),
        (["serve", "--tiers", "{}/tiers.yaml", "--data-dir", "{}/data"], 78, ["tiers.a.batch_size.start"]),
        (["serve", "--engine", "openai"], 2, ["--upstream http://HOST:PORT"]),
        (["serve", "--engine", "vllm", "--quantize", "int4"], 2, ["tidegate serve: --quantize is for --engine native"]),
        (["serve", "--upstream", "http://127.0.0.1:1"], 2, ["--engine openai"]),
        (
            ["serve", "--port", "0", "--data-dir", "{}", "--ssl-certfile", "{}/cert.pem"],
            78,
            ["cert.pem does not"],
        ),
    ],
)
def test_each_mistake_ends_a_command_with_a_sentence(
    arguments: list[str],
    code: int,
    said: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "")  # so that what the command sets for its parts ends with the test
    monkeypatch.delenv(CONFIG_VARIABLE)
    (tmp_path / "tidegate.yaml").write_text("port: 9000\nprot: 9001\n")
    (tmp_path / "tiers.yaml").write_text(TIERS)
    (tmp_path / "list.yaml").write_text("- port: 9000\n")
    (tmp_path / "broken.yaml").write_text("port: 9000\napi_key: sk-secret: x\n")
    (tmp_path / "latin.yaml").write_bytes("# Größe\nport: 9000\n".encode("latin-1"))
    with pytest.raises(SystemExit) as ended:
        cli.main([argument.format(tmp_path) for argument in arguments])
    printed = "".join(capfd.readouterr())
    assert ended.value.code == code, printed
    assert all(text in printed for text in said), printed
    assert "sk-secret" not in printed
    assert "Traceback" not in printed and "started" not in printed


@pytest.mark.full
def test_a_missing_model_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    ended = run_to_end("serve", "--model", str(tmp_path / "nope"), "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == 78
    assert str(tmp_path / "nope") in ended.stderr
    assert "Traceback" not in ended.stderr
