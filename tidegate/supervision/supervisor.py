"""Keeps the processes of one machine running, and ends them in order: the gateway first, the store last.

Knows processes, signals, exit codes and what the processes report (notify.py); does not know what they do. A process
that hangs is killed and started again. The processes inherit stdout and stderr, and write their own logs there.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from tidegate.supervision.keeper import EXIT_FAILED, Keeper, Part, Stage
from tidegate.supervision.process import hangup_calls, signals_call

log = structlog.get_logger()

DRAIN_S = 30.0  # seconds for running requests to finish
FAILED_DRAIN_S = 5.0  # seconds; the same after a part was given up, because requests can hardly finish then


class Supervisor:
    """Runs parts until a signal arrives, `stop()` is called, or a part cannot be kept running.

    Call `run` only once per object, in the main thread.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        *,
        drain_s: float = DRAIN_S,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """`drain_s` is the maximum duration of a part's drain. `on_ready` is called once, when every part is ready."""
        self._keepers = [Keeper(part, self._give_up) for part in parts]
        self._drain_s = drain_s
        self._on_ready = on_ready
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._exit_code = 0

    def stop(self) -> None:
        """Drain all parts and end. A second call kills all parts at once."""
        if self._stopping.is_set():
            self._killing.set()
        self._stopping.set()

    def reload(self) -> None:
        for keeper in self._keepers:
            keeper.reload()

    async def run(self) -> int:
        """Run until the end. Return the exit code.

        The code is 0 after a clean drain, and 78 if a part ended with 78 before it was ever ready. Otherwise it is 1: a
        part kept dying, had to be killed, or ended its drain with an error.
        """
        with signals_call(self.stop), hangup_calls(self.reload, self.stop):
            starting = asyncio.create_task(self._start())
            await self._stopping.wait()
            starting.cancel()
            await asyncio.wait({starting})
            await self._end(FAILED_DRAIN_S if self._exit_code else self._drain_s)
        return self._exit_code

    async def _start(self) -> None:
        """Start the store. When it is ready, start all other parts together, and wait until they are ready."""
        for is_store in (True, False):
            keepers = [k for k in self._keepers if (k.part.stage is Stage.STORE) is is_store]
            for keeper in keepers:
                keeper.start()
            await asyncio.gather(*(keeper.ready.wait() for keeper in keepers))
        log.info("all parts are ready")
        if self._on_ready is not None:
            self._on_ready()

    async def _end(self, drain_s: float) -> None:
        """Stop the parts stage by stage, the gateway first. Parts of the other stages are kept running meanwhile."""
        log.info("stopping", drain_s=drain_s)
        for stage in reversed(Stage):
            keepers = [k for k in self._keepers if k.part.stage is stage]
            clean = await asyncio.gather(*(k.stop(drain_s, self._killing) for k in keepers))
            if not all(clean):
                self._exit_code = self._exit_code or EXIT_FAILED

    def _give_up(self, part: Part, exit_code: int, reason: str) -> None:
        log.error("giving up", part=part.name, reason=reason, hint=part.hint)
        self._exit_code = self._exit_code or exit_code
        self._stopping.set()
