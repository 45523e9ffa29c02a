"""What keeping processes needs of the operating system: children that cannot outlive this one, signals, names, codes.

A child ends with this process, whatever ends it, on Linux only (`PR_SET_PDEATHSIG`); elsewhere this one's clean exit
alone ends it.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def dies_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the child gets SIGKILL when the *thread* that started it ends, so start children from
    the main thread. Everything it needs is resolved here, before the fork: between fork and exec only system
    calls are safe."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return bind


def ignore_hangup() -> None:
    """For the time before `hangup_calls`: a SIGHUP that nobody handles would end the process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextlib.contextmanager
def hangup_calls(reload: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """SIGHUP calls `reload`, within the block, and is ignored after it; where it says that the terminal has been
    closed, it calls `stop`. For the main thread, in a running loop."""
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
    """SIGINT and SIGTERM call `stop`, within the block. For the main thread, in a running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def worker_name(worker_id: str) -> str:
    """What people and other processes call it; the same after a restart."""
    return f"worker {worker_id}"


def gateway_name(port: int) -> str:
    """Likewise."""
    return f"gateway {socket.gethostname()}:{port}"


def exit_text(code: int | None) -> str:
    """An exit code as people read it; negative ones are signals."""
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"code {code}"
