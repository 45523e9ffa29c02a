"""Has the grammars of claimed requests compiled before the requests start, so that no step waits for a compiler.

One grammar is compiled at a time, and the one of the highest tier first: a batch with a thousand grammars does not hold
up an interactive request. Knows the core and the engine; does not know what a grammar is.
"""

import asyncio
from collections.abc import Awaitable, Callable

from engine.interface import Engine, GrammarError
from scheduler.drivers.steps.core import StepCore
from scheduler.request import Request
from scheduler.worker.request_intake import RequestIntake


class GrammarCompiler:
    def __init__(
        self, core: StepCore, engine: Engine, intake: RequestIntake, before: Callable[[], Awaitable[None]]
    ) -> None:
        """`before` is awaited before each compilation."""
        self._core = core
        self._engine = engine
        self._intake = intake
        self._before = before
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look for grammars to compile."""
        self._woken.set()

    async def run(self) -> None:
        """Have grammars compiled as they arrive, until this task is cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while (request := self._core.next_to_compile()) is not None:
                await self._compile(request)

    async def _compile(self, request: Request) -> None:
        assert request.sampling.grammar is not None
        await self._before()
        try:
            compiled = await self._engine.compile_grammar(request.sampling.grammar)
        except GrammarError as error:
            self._core.refuse_grammar(request.id, str(error))
            self._intake.changed.set()
        else:
            self._core.note_compiled(request.id, compiled)
            self._intake.announce([request.id])
