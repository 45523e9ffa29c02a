"""Keeps one process running: starts it again when it ends or hangs, until it cannot be kept running.

Knows processes, signals and what they report (notify.py); does not know the other parts.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import structlog

from tidegate.supervision.notify import Reports
from tidegate.supervision.process import SETTLED_S, dies_with_parent, exit_text, ignore_hangup, pause_s

log = structlog.get_logger()

EX_CONFIG = 78  # <sysexits.h>: the part cannot start, and another attempt will not help
EXIT_FAILED = 1
MAX_FAILED_STARTS = 5  # number of starts after which a part that was never ready is given up
PROBE_INTERVAL_S = 0.05  # seconds between two checks whether a part is ready
WATCHDOG_S = 15.0  # seconds without a sign of life, after which a part that was ready is killed and started again
KILL_GRACE_S = 10.0  # seconds for a part to end after its drain: it cancels the remaining work and cleans up


class Stage(IntEnum):
    """The stage of a part. The store starts first, and then all other parts together.

    Parts stop in the reverse order of the stages. Parts of one stage stop together.
    """

    STORE = 0  # must be ready before anything else starts
    WORKER = 1
    GATEWAY = 2  # stops first: it admits no more requests while the workers finish the running ones


@dataclass(frozen=True, slots=True)
class Part:
    """A process to keep running. SIGTERM asks it to drain, and a second SIGTERM asks it to end at once."""

    name: str
    stage: Stage
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the supervisor's environment
    # Returns True when the part can serve. None: the process reports that it is ready and alive, and is watched.
    ready: Callable[[], Awaitable[bool]] | None = None
    before_start: Callable[[], Awaitable[None]] | None = None  # called before each start
    pass_fds: tuple[int, ...] = ()
    hint: str = "its own last lines say why"  # logged when the part is given up; it says where to look for the reason


class Keeper:
    """Keeps one part running: starts its process again when it ends although it was not asked to. Owns the process."""

    def __init__(self, part: Part, give_up: Callable[[Part, int, str], None]) -> None:
        self.part = part
        self.ready = asyncio.Event()  # set when the part was ready for the first time; never cleared
        self._give_up = give_up
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        # Exit code of the process that was asked to stop; None: no process was asked to.
        self._last_code: int | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"keep-{self.part.name}")

    def reload(self) -> None:
        """Let the process read its files again, if it can: a SIGHUP without a handler is ignored."""
        self._signal(signal.SIGHUP)

    async def stop(self, drain_s: float, killing: asyncio.Event) -> bool:
        """Send SIGTERM, and a second SIGTERM after `drain_s`, so that the process ends.

        Send SIGKILL if the process has not ended `KILL_GRACE_S` later, or at once when `killing` is set. Return whether
        the process ended cleanly.
        """
        self._stopping.set()
        if self._task is None:
            return True
        kill = asyncio.create_task(killing.wait())
        for patience_s in (drain_s, KILL_GRACE_S):
            self._signal(signal.SIGTERM)
            await asyncio.wait({self._task, kill}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done() or killing.is_set():
                break
        kill.cancel()
        if not self._task.done():
            log.warning("killing a part that has not ended", part=self.part.name)
            self._kill()
            await self._task
            return False
        if self._last_code is None:
            return True
        log.info("stopped", part=self.part.name, exit=exit_text(self._last_code))
        return self._last_code in (0, -signal.SIGTERM)

    async def _keep(self) -> None:
        """Start the process again and again, until the keeper is asked to stop or another start is pointless."""
        failed_starts = num_restarts = 0
        while not self._stopping.is_set():
            started_s = asyncio.get_running_loop().time()
            try:
                code = await self._live()
            except Exception as error:  # the program does not exist: a mistake in the command line
                log.exception("part cannot be run", part=self.part.name)
                self._kill()
                return self._give_up(self.part, EXIT_FAILED, str(error))
            ran_s = asyncio.get_running_loop().time() - started_s
            if self._stopping.is_set():
                self._last_code = code
                return
            failed_starts += not self.ready.is_set()
            if self._is_hopeless(code, failed_starts):
                return
            num_restarts = 0 if ran_s >= SETTLED_S else num_restarts
            await self._pause(code, ran_s, pause_s(num_restarts))
            num_restarts += 1

    def _is_hopeless(self, code: int, failed_starts: int) -> bool:
        """Give the part up if it was never ready and cannot start. Return whether it was given up.

        A part that was ready before is not given up: an exit code 78 after that has a temporary cause, such as GPU
        memory that is not free again yet.
        """
        if code == EX_CONFIG and not self.ready.is_set():
            self._give_up(self.part, EX_CONFIG, "it cannot start")
        elif failed_starts >= MAX_FAILED_STARTS:
            self._give_up(self.part, EXIT_FAILED, f"it ended {failed_starts} times while starting")
        else:
            return False
        return True

    async def _pause(self, code: int, ran_s: float, backoff_s: float) -> None:
        """Wait `backoff_s` seconds, or until the keeper is asked to stop."""
        log.warning(
            "a part ended and will be started again",
            part=self.part.name,
            exit=exit_text(code),
            ran_s=round(ran_s, 1),
            backoff_s=backoff_s,
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), backoff_s)

    async def _live(self) -> int:
        """Start the process and wait for its end. Return the exit code; a negative code means a signal.

        The process has its own session, so that Ctrl-C in the terminal reaches only the supervisor.
        """
        if self.part.before_start is not None:
            await self.part.before_start()
        if self.part.ready is not None:
            return await self._run_process({}, partial(self._probe, self.part.ready))
        with Reports() as reports:
            return await self._run_process(reports.env, partial(self._watch, reports))

    async def _run_process(self, env: Mapping[str, str], observe: Callable[[], Coroutine[Any, Any, None]]) -> int:
        """Run the process to its end, and `observe` it meanwhile. Return the exit code."""
        self._process = await asyncio.create_subprocess_exec(
            *self.part.argv,
            env={**os.environ, **self.part.env, **env},
            pass_fds=self.part.pass_fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_in_child(),
        )
        log.info("started", part=self.part.name, pid=self._process.pid)
        if self._stopping.is_set():  # the keeper was asked to stop while the process was being started
            self._signal(signal.SIGTERM)
        async with asyncio.TaskGroup() as group:
            observer = group.create_task(observe())
            code = await self._process.wait()
            observer.cancel()
        return code

    async def _watch(self, reports: Reports) -> None:
        """Wait until the process reports that it is ready. Kill it if it gives no sign of life any more.

        A process that does not end after a stop signal is not killed here: `stop` has its own limits.
        """
        await reports.ready.wait()
        self._note_ready()
        await reports.until_silent(WATCHDOG_S)
        if not self._stopping.is_set():
            log.error("killing a part that hangs: it gives no sign of life", part=self.part.name, silent_s=WATCHDOG_S)
            self._kill()

    async def _probe(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        while not await is_ready():
            await asyncio.sleep(PROBE_INTERVAL_S)
        self._note_ready()

    def _note_ready(self) -> None:
        log.info("ready", part=self.part.name)
        self.ready.set()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _kill(self) -> None:
        """Kill the process and all processes that it has started."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _in_child() -> Callable[[], None]:
    """Return a `preexec_fn` for a child that ends with this process and ignores SIGHUP until it sets a handler."""
    bind = dies_with_parent()

    def prepare() -> None:
        ignore_hangup()
        bind()

    return prepare
