"""What a part tells its supervisor: that it is ready, and that it is alive. The protocol is systemd's `sd_notify`.

A part sends datagrams to the socket that the environment variable `NOTIFY_SOCKET` names. The supervisor makes a new
socket, in a private directory, for every process that it starts. So only this process can prove that it is ready, and
neither another server on the same port nor an earlier process can. A part that systemd started reports to systemd
(`Type=notify`, `WatchdogSec=`). Without the variable, nothing is sent.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

VARIABLE = "NOTIFY_SOCKET"
FOLDER_PREFIX = "tidegate-notify-"  # of the private directories, in the system's directory for temporary files
READY, ALIVE = b"READY=1", b"WATCHDOG=1"
READY_CHECK_S = 0.05  # seconds between two checks whether this process is ready
ALIVE_S = 1.0  # seconds between two signs of life
MAX_MESSAGE_BYTES = 256


async def report_life(
    is_ready: Callable[[], bool],
    is_stuck: Callable[[], bool] = lambda: False,
    note_alive: Callable[[], None] = lambda: None,
) -> None:
    """Report when this process is ready, and from then on every second that it is alive, unless it is stuck.

    `note_alive` is called at each of these reports. Runs until it is cancelled. Run it in the event loop that does the
    work, so that a loop that hangs reports nothing.
    """
    while not is_ready():
        await asyncio.sleep(READY_CHECK_S)
    _send(READY)
    while True:
        if not is_stuck():
            _send(ALIVE)
            note_alive()
        await asyncio.sleep(ALIVE_S)


def _send(message: bytes) -> None:
    address = os.environ.get(VARIABLE)
    if not address:
        return
    # A supervisor that is gone, or too busy to read, must not stop this process.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(message, "\0" + address[1:] if address.startswith("@") else address)


def remove_dead_folders() -> None:
    """Remove the directories that killed supervisors of this user have left. Those of live ones stay."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it just now
            found = folder.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_own and (entries := list(folder.iterdir())) and all(map(_is_dead, entries)):
                shutil.rmtree(folder)


def _is_dead(path: Path) -> bool:
    """Whether `path` is a socket that no process has bound."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


class Reports:
    """The supervisor's end: what one process has reported. Use it as `with`, in a running event loop."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self._reported_s = 0.0  # time of the last report, by the event loop's clock
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as cleanup:
            path = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX))) / "notify"
            self._receiver = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            self._receiver.bind(str(path))
            self._receiver.setblocking(False)
            loop = asyncio.get_running_loop()
            loop.add_reader(self._receiver, self._read)
            cleanup.callback(loop.remove_reader, self._receiver)
            self.env = {VARIABLE: str(path)}
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    async def until_silent(self, limit_s: float) -> None:
        """Return when the process is ready and has reported nothing for `limit_s` seconds."""
        await self.ready.wait()
        loop = asyncio.get_running_loop()
        while (left_s := self._reported_s + limit_s - loop.time()) > 0:
            await asyncio.sleep(left_s)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while message := self._receiver.recv(MAX_MESSAGE_BYTES):
                self._reported_s = asyncio.get_running_loop().time()
                if READY in message.splitlines():
                    self.ready.set()
