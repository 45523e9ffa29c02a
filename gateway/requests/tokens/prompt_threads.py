"""The threads in which a gateway encodes prompts and compiles grammars.

No prompt of an interactive tier waits for one of a bulk tier, and none for the long text of another request. The long
texts of a client wait for each other, so that they hold up those of another client by one at most.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gateway.fairness import Turns
from gateway.requests.tokens.tokenizer import RunInThread
from scheduler.config import Tier

T = TypeVar("T")

SHORT_THREADS = 2  # for interactive tiers; encoding is faster than any engine, so that few are enough


class PromptThreads:
    def __init__(self) -> None:
        self._interactive, self._bulk = _Threads("prompt", SHORT_THREADS), _Threads("bulk-prompt", 1)

    def of(self, tier: Tier, owner: str | None) -> RunInThread:
        """Return a function that runs work on a prompt of `owner` (None: access is open)."""
        return partial((self._interactive if tier.is_interactive else self._bulk).run, owner or "")


class _Threads:
    def __init__(self, name: str, num_short: int) -> None:
        self._short = ThreadPoolExecutor(num_short, name)
        self._long = ThreadPoolExecutor(1, f"long-{name}")
        self._turns = Turns()  # at the thread for long texts

    async def run(self, owner: str, work: Callable[[], T], *, is_long: bool) -> T:
        loop = asyncio.get_running_loop()
        if not is_long:
            return await loop.run_in_executor(self._short, work)
        async with self._turns.of(owner):
            return await loop.run_in_executor(self._long, work)
