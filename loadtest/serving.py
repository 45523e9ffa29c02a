"""Servers that are started for a measurement and ended after it, such as `tidegate serve`.

Each server has its own process group, so that none of its processes outlives the block, and Ctrl-C in the terminal does
not reach it. Knows command lines, ports and processes; does not know what is measured.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.client.http import Target, TargetError, discover_model, get
from loadtest.machine import python_path

START_TIMEOUT_S = 600.0  # vLLM compiles for more than a minute the first time
END_TIMEOUT_S = 45.0  # seconds that a server has to end after SIGTERM; then it gets SIGKILL
LOG_TAIL = 600  # characters of the log's end in an error message


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure. `pid` is its main process; None if the server was already running."""

    target: Target
    pid: int | None = None


def tidegate_command(
    model_dir: Path | None, load_format: str, data_dir: Path, num_threads: int | None, flags: Sequence[str]
) -> list[str]:
    """Return the command of `tidegate serve`.

    Without `model_dir`, the command serves the demo model. Without `num_threads`, the server chooses the number of
    threads.
    """
    command = [sys.executable, "-m", "tidegate", "serve", "--data-dir", str(data_dir), "--log-level", "warning"]
    if model_dir is not None:
        command += ["--model", str(model_dir), "--load-format", load_format]
    if num_threads:
        command += ["--threads", str(num_threads)]
    return [*command, *flags]


def tidegate_environment() -> dict[str, str]:
    """Return this process's environment variables, changed to use the same source tree and no network.

    The other variables are unchanged, so that the server runs as if a user had started it.
    """
    return {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}


@asynccontextmanager
async def serving(
    command: Sequence[str], log_file: Path, ready_path: str, environment: Mapping[str, str], api_key: str = ""
) -> AsyncIterator[Server]:
    """Run `command` with a free `--port` until the block ends. Its requests carry `api_key`, if there is one.

    Yields the server once `ready_path` answers 200. Raises `TargetError` if the server ends or does not
    become ready.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        target = Target("127.0.0.1", port, api_key=api_key)
        await _wait_until_ready(process, target, ready_path, log_file)
        yield Server(replace(target, model=await discover_model(target)), process.pid)
    finally:
        await asyncio.to_thread(_end, process)


async def _wait_until_ready(process: subprocess.Popen[bytes], target: Target, ready_path: str, log_file: Path) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                if process.poll() is not None:
                    raise TargetError(
                        f"the server ended with code {process.returncode}; its log ends: {_tail(log_file)}"
                    )
                with suppress(TargetError):
                    await get(target, ready_path, timeout_s=5.0)
                    return
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise TargetError(f"the server was not ready within {START_TIMEOUT_S:.0f} s: {_tail(log_file)}") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the command, which ends its own child processes. Then kill what is left of its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log_file: Path) -> str:
    return json.dumps(log_file.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip(), ensure_ascii=False)
