"""Helpers for processes: children that end with this process, signals, background tasks, ports, names, exit codes.

On Linux, children are killed when this process ends for any reason (`PR_SET_PDEATHSIG`). On other systems, children end
only if this process exits cleanly.
"""

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
BACKLOG = 2048  # connections that the kernel queues: enough for a burst of clients
# Pauses before a part, or a worker's loop, begins again, in s: each doubles the one before.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
MAX_DOUBLINGS = 16  # keeps 2**failures within a float; the bound above is reached much earlier
SETTLED_S = 30.0  # s; what ran for this long has started well, so its pauses begin anew
# s between two threads that compute, for sys.setswitchinterval. With the default of 5 ms, the engine's thread and the
# gateway's event loop would wait long for the interpreter's lock.
SWITCH_INTERVAL_S = 0.0005


def dies_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` that makes the kernel kill the child when this process ends.

    The kernel sends SIGKILL when the *thread* that started the child ends, so start children from the main thread. All
    look-ups happen before the fork, because only system calls are safe between fork and exec. On systems other than
    Linux, the returned function does nothing.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the line above
            os._exit(1)

    return bind


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open descriptors to what the system allows, also for its children. Return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def keep_files_private() -> None:
    """Make all files that this process and its children create from now on readable only for this user.

    They hold prompts and answers.
    """
    os.umask(0o077)


# New objects after which a collection looks for garbage among them. With Python's own number, 700, which a few requests
# have, a gateway with 64 open requests spends 4 % of its CPU time on collections.
YOUNG_OBJECTS = 10_000


def settle_heap() -> None:
    """Let garbage collections leave out all objects that exist now, and be few. Call it at the end of a start.

    A collection that looks through all that torch and transformers have made takes 140 ms, in which no token is
    computed. Memory that the C library holds free goes back to the system: reading the tokenizer of Gemma 3 leaves
    300 MB of it, and packing a model's weights leaves copies of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in GNU's
    if trim is not None:
        trim(0)


def ignore_hangup() -> None:
    """Ignore SIGHUP until `hangup_calls` sets a handler. By default, SIGHUP would end the process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextlib.contextmanager
def hangup_calls(reload: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGHUP call `reload` within the block, or `stop` if the terminal was closed.

    After the block, SIGHUP is ignored. Use it in the main thread, in a running event loop.
    """
    loop = asyncio.get_running_loop()
    had_terminal = os.isatty(0)

    def on_hangup() -> None:
        is_closed = had_terminal and not os.isatty(0)
        (stop if is_closed else reload)()

    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        ignore_hangup()


@contextlib.contextmanager
def signals_call(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `stop` within the block. Use it in the main thread, in a running event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class Background:
    """Tasks of signal handlers, which cannot wait for them. Use it as `async with`: its end cancels those that run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CannotStart(Exception):
    """A part cannot start with its settings, and another attempt will not help. The message is for the operator."""


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a listening socket. Port 0 means any free port. Raises `CannotStart` if the address cannot be used.

    `flag` is the flag with which the operator chooses another port.
    """
    bound = bind(host, port, flag)
    open_port(bound, flag)
    return bound


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a socket that has its address, but refuses connections until `open_port`. Raises like `listen`."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    with _cannot_listen(bound, host, port, flag):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    return bound


def open_port(bound: socket.socket, flag: str = "--port") -> None:
    """Let a socket of `bind` listen. Raises `CannotStart` if another program has begun to listen there meanwhile."""
    host, port = bound.getsockname()[:2]
    with _cannot_listen(bound, host, port, flag):
        bound.listen(BACKLOG)


@contextmanager
def _cannot_listen(bound: socket.socket, host: str, port: int, flag: str) -> Iterator[None]:
    """Close the socket after an `OSError` of the block, and raise `CannotStart`."""
    try:
        yield
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            reason = f"cannot listen on {host}:{port}: another program does; end it, or choose another port with {flag}"
        else:
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise CannotStart(reason) from error


def pause_s(failures: int) -> float:
    """Return the pause after a failure, before which there were `failures` in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, MAX_DOUBLINGS))


def worker_name(worker_id: str) -> str:
    """Return the worker's name for people and other processes. It stays the same after a restart."""
    return f"worker {worker_id}"


def gateway_name(port: int) -> str:
    """Return the gateway's name for people and other processes. It stays the same after a restart."""
    return f"gateway {socket.gethostname()}:{port}"


def end_child(child: "subprocess.Popen[bytes]", patience_s: float) -> None:
    """End a child with SIGTERM, and with SIGKILL if it has not ended after `patience_s` seconds."""
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(patience_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def exit_text(code: int | None) -> str:
    """Return an exit code as text. A negative code means that a signal has ended the process."""
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"code {code}"
