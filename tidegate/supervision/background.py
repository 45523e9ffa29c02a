"""Background tasks for signal handlers, which cannot wait for them. The tasks end when the process stops serving."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class Background:
    """A set of background tasks. Use it as `async with`: tasks that still run at the end of the block are cancelled."""

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
