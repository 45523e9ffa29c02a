"""The processes of the demo: each ends with it. Starts commands of Tidegate as a user would."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tidegate.settings.base import CommonSettings
from tidegate.supervision.process import dies_with_parent, exit_text

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 45.0  # seconds; longer than the default drain of 30 s

Process = subprocess.Popen[bytes]


class DemoError(Exception):
    """An error of the demo. The message is one sentence for the user."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def start(command: str, settings: CommonSettings, *flags: str) -> Process:
    """Start a command of Tidegate with what all commands take from `settings`, and with `flags`."""
    argv = [sys.executable, "-m", "tidegate", command, *settings.flags(CommonSettings), *flags]
    env = {**os.environ, **settings.secret_env}
    return subprocess.Popen(argv, preexec_fn=dies_with_parent(), stdout=subprocess.DEVNULL, env=env)


def wait_until_ready(
    processes: Sequence[Process], root_url: str, is_whole: Callable[[dict[str, Any]], bool] = lambda _: True
) -> None:
    """Wait until the gateway at `root_url` answers that it is ready, with a report that `is_whole`.

    Raises `DemoError` if one of the `processes` ends before, or if it takes too long.
    """
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        for process in processes:
            if process.poll() is not None:
                raise DemoError(f"a part of the server ended with {exit_text(process.returncode)} before it was ready")
        try:
            answer = httpx.get(f"{root_url}/ready", timeout=2)
            if answer.status_code == 200 and is_whole(answer.json()):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise DemoError(f"the server was not ready within {START_TIMEOUT_S:.0f} s")
