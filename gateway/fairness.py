"""Fairness among owners: turns at work, limits of how much is under way, shares of memory.

An owner is whoever must not hold up or crowd out others: a key, named by its name, or an address while access is open.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

Owner = str | None


class Turns:
    """Up to `at_once` pieces of work at a time, and up to `of_owner` of each owner. Owners take turns."""

    def __init__(self, at_once: int = 1, of_owner: int = 1) -> None:
        self._all = asyncio.Semaphore(at_once)
        self._of_owner = of_owner
        self._of: WeakValueDictionary[Owner, asyncio.Semaphore] = WeakValueDictionary()

    async def begin(self, owner: Owner) -> Callable[[], None]:
        """Wait for a turn of `owner`. It lasts until the returned function is called."""
        own = self._of.setdefault(owner, asyncio.Semaphore(self._of_owner))
        await own.acquire()
        try:
            await self._all.acquire()
        except BaseException:
            own.release()
            raise

        def end() -> None:
            self._all.release()
            own.release()

        return end

    @asynccontextmanager
    async def of(self, owner: Owner) -> AsyncIterator[None]:
        """Wait for a turn of `owner`, which lasts until the block ends."""
        end = await self.begin(owner)
        try:
            yield
        finally:
            end()


class FairLock:
    """Turns on the event loop for short pieces of work: the loop does whatever else is due between two of them.

    Two hundred requests may come at once, and a step of the engine may end a hundred answers, each of which makes room
    for a new line of a batch. If all of them were handled before the loop does anything else, all streams would stand
    still.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[Owner, deque[asyncio.Future[None]]] = {}  # the first owner has the next turn

    async def acquire(self, owner: Owner) -> None:
        """Wait for a turn of `owner`, which lasts until the caller waits for something else."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.setdefault(owner, deque()).append(turn)
            await turn
        else:
            self._is_taken = True
            loop.call_soon(self._give_next, loop)

    def _give_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the next one run in the next iteration of the event loop, and the one after it in another iteration."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the other owners
            if not turn.done():  # a cancelled one wants no turn
                turn.set_result(None)
                loop.call_soon(self._give_next, loop)
                return
        self._is_taken = False


class UnderWay:
    """How many pieces of work are under way: at most `most` of them, and at most `of_owner` of each owner."""

    def __init__(self, most: int, of_owner: int) -> None:
        self._most = most
        self._most_of_owner = of_owner
        self._num_of: Counter[Owner] = Counter()

    def num_of(self, owner: Owner) -> int:
        return self._num_of[owner]

    def is_full(self, owner: Owner) -> bool:
        """Return whether `owner` has reached a limit."""
        return self._num_of[owner] >= self._most_of_owner or self._num_of.total() >= self._most

    def begin(self, owner: Owner) -> Callable[[], None]:
        """Count a piece of work until the returned function is called."""
        self._num_of[owner] += 1

        def end() -> None:
            self._num_of[owner] -= 1
            if not self._num_of[owner]:
                del self._num_of[owner]

        return end


class HeldBytes:
    """Bytes that owners hold in memory, of `most` that all may hold together.

    An owner may hold at most twice the free bytes, so some always stay free: one owner alone holds two thirds.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = 0
        self._num_of: Counter[Owner] = Counter()

    def add(self, owner: Owner, num_bytes: int) -> None:
        """Count bytes that `owner` holds from now on, or no longer if the number is negative."""
        self._num += num_bytes
        self._num_of[owner] += num_bytes
        if not self._num_of[owner]:
            del self._num_of[owner]

    def has_too_many(self, owner: Owner) -> bool:
        """Return whether `owner` holds more than its share."""
        return self._num_of[owner] > 2 * (self._most - self._num)

    @property
    def is_crowded(self) -> bool:
        """Whether over half of the bytes are held."""
        return 2 * self._num > self._most
