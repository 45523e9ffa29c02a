"""The directories of the supervisor's sockets: those of killed supervisors go, all others stay."""

import socket
import tempfile
from pathlib import Path

import pytest

from tidegate.supervision.notify import FOLDER_PREFIX, Reports, remove_dead_folders


def leave_behind(folder: Path) -> Path:
    """Make a directory as a killed supervisor leaves it: with a socket that nobody has bound any more."""
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(folder / "notify"))
    return folder


async def test_only_the_directories_of_dead_supervisors_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = leave_behind(tmp_path / f"{FOLDER_PREFIX}dead")
    foreign = leave_behind(tmp_path / "other")
    starting = tmp_path / f"{FOLDER_PREFIX}starting"
    starting.mkdir()
    with_data = leave_behind(tmp_path / f"{FOLDER_PREFIX}data")
    (with_data / "file").write_text("")
    link = tmp_path / f"{FOLDER_PREFIX}link"
    link.symlink_to(foreign)
    with Reports() as alive:
        remove_dead_folders()
        assert Path(alive.env["NOTIFY_SOCKET"]).exists()
    assert not dead.exists()
    assert all(path.exists() for path in (foreign / "notify", starting, with_data / "notify", link))
