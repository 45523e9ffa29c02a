"""How far the start of a worker is: a line on a terminal, a log line for each phase, and reports to the gateways.

Loading takes minutes for a large model, and blocks the worker's own thread. So the reports come from another one.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Self

import structlog
from redis.exceptions import RedisError

from engine.progress import Phase
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.registry.worker_status import WorkerStart
from scheduler.store import connection

log = structlog.get_logger()

REPORT_S = 1.0  # seconds between two reports
END_S = 2.0  # longest wait for the last report, which withdraws the others


class StartPhase:
    """A phase of the start. Implements `engine.progress.Phase`."""

    def __init__(self, name: str, on_change: Callable[[int, int], None]) -> None:
        self.name = name
        self.began_s = time.monotonic()
        self.share: float | None = None  # None: unknown
        self._on_change = on_change

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    def show(self, done: int, total: int) -> None:
        self.share = done / total if total else None
        self._on_change(done, total)


class StartProgress:
    """The progress of one start. Implements `engine.progress.Progress`. Use it as `with`; `close` ends it earlier."""

    def __init__(self, worker_id: str, redis_url: str, on_terminal: bool) -> None:
        """`on_terminal` says whether a line on stderr shows the progress."""
        self._worker_id = worker_id
        self._redis_url = redis_url
        self._on_terminal = on_terminal
        self._phase: StartPhase | None = None
        self._ended = threading.Event()
        self._reporting = threading.Thread(target=self._run_reports, name="start-progress", daemon=True)

    def __enter__(self) -> Self:
        self._reporting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the reports: the worker serves from now on, or it has failed."""
        self._ended.set()
        self._reporting.join(END_S)

    @contextmanager
    def phase(self, name: str, *, draws_itself: bool = False) -> Iterator[Phase]:
        drawing: AbstractContextManager[Callable[[int, int], None]] = nullcontext(lambda done, total: None)
        if self._on_terminal and not draws_itself:
            drawing = _drawn(name)
        with drawing as draw:
            phase = self._phase = StartPhase(name, draw)
            try:
                yield phase
            finally:
                self._phase = None
        log.info("a phase of the start is done", phase=name, seconds=round(phase.seconds, 2))

    def _run_reports(self) -> None:
        try:
            asyncio.run(self._report())
        except (RedisError, OSError) as error:  # the worker itself will say so, or the store comes back
            log.debug("the start is not reported", reason=str(error))

    async def _report(self) -> None:
        async with connection.connect(self._redis_url) as redis:
            registry = RedisWorkerRegistry(redis)
            try:
                while not self._ended.is_set():
                    if (phase := self._phase) is not None:
                        start = WorkerStart(self._worker_id, phase.name, phase.seconds, phase.share)
                        await registry.announce_start(start)
                    await asyncio.to_thread(self._ended.wait, REPORT_S)
            finally:
                await registry.withdraw_start(self._worker_id)


@contextmanager
def _drawn(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a line on stderr with the time that the phase `name` takes, and with its share that is done, if known."""
    # Imported here, because only a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
