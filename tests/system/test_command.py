"""The command line: help texts, and messages for mistakes."""

import socket
from pathlib import Path

import pytest

from tests.system.server import run_to_end

TIERS = """\
default_tier: a
batch_tier: a
tiers:
  a: {priority: 1, batch_size: {min: 1, start: 0, max: 8}}
"""


def test_without_a_command_the_usage_is_shown() -> None:
    ended = run_to_end()
    assert ended.returncode == 2
    assert "serve" in ended.stdout


@pytest.mark.parametrize("command", ["serve", "gateway", "worker", "demo"])
def test_every_command_has_help(command: str) -> None:
    ended = run_to_end(command, "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"usage: tidegate {command}")
    assert "--model" in ended.stdout
    assert "--config" in ended.stdout


@pytest.mark.parametrize("command", ["gateway", "worker"])
def test_gateway_and_worker_need_a_store(command: str) -> None:
    ended = run_to_end(command)
    assert ended.returncode == 2
    assert "--redis-url" in ended.stderr


def test_wrong_values_are_named() -> None:
    ended = run_to_end("serve", "--port", "abc", "--load-format", "x")
    assert ended.returncode == 2
    assert "--port" in ended.stderr
    assert "--load-format" in ended.stderr


def test_an_unknown_key_in_the_settings_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.yaml"
    file.write_text("port: 9000\nprot: 9001\n")
    ended = run_to_end("serve", "--config", str(file))
    assert ended.returncode == 2
    assert "prot" in ended.stderr


def test_a_bad_tiers_file_is_refused_with_the_key(tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(TIERS)
    ended = run_to_end("serve", "--tiers", str(file), "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == 78
    assert "tiers.a.batch_size.start" in ended.stderr


def test_a_missing_model_ends_the_command_with_one_sentence(tmp_path: Path) -> None:
    ended = run_to_end("serve", "--model", str(tmp_path / "nope"), "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == 78
    assert str(tmp_path / "nope") in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run_to_end("serve", "--port", port, "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == 78
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
