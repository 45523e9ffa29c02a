"""Makes one process use the tiers that the store has in force, and vote on proposed tiers.

A part (a gateway or worker process) that starts while other parts run takes the tiers that are in force. The first part
puts its own file in force. So a change made at run time lasts as long as any part runs, or until a part starts with a
newer file, which `coordinator` then offers to all parts. When all parts have ended, the next start uses the file again.
Knows documents and votes; the `TierConsumer` uses the tiers, and `coordinator` makes changes.
"""

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec
import structlog
from redis.exceptions import RedisError

from scheduler.clock import Clock
from scheduler.config import TierConfigError, TierSet, parse_tiers
from scheduler.reload.store import Follower, TierDocument, TierStore

log = structlog.get_logger()

REPORT_S = 1.0  # seconds between two reads of the store, and between two reports to it, while nothing changes
JOIN_S = 5.0  # seconds to wait for the end of a change in progress before this part joins
POLL_S = 0.01  # seconds between two attempts to join


class TierConsumer(Protocol):
    """The component that uses the tiers in this process."""

    def objection(self, tiers: TierSet) -> str:
        """Return a sentence that says why this process cannot use `tiers` now; an empty string if it can use them."""
        ...

    def reconfigure(self, tiers: TierSet) -> None:
        """Use `tiers` from now on."""
        ...


@dataclass(frozen=True, slots=True)
class InForce:
    """The tiers that this process uses. `generation` is 0 while the store has not answered yet."""

    tiers: TierSet
    generation: int
    source: str
    set_ms: int
    file: str  # digest of the tiers file that was put in force last


class TierFollower:
    """The owner of the tiers in force in this process.

    Use it as `async with`: it follows the store inside the block.
    """

    def __init__(
        self, store: TierStore, consumer: TierConsumer, part: str, tiers: TierSet, path: Path, clock: Clock
    ) -> None:
        """`part` names this process in the store. `tiers` were read from `path`, and `consumer` already uses them."""
        self._store = store
        self._consumer = consumer
        self._clock = clock
        self.part = part
        self._path = path
        self._own_file = digest_of(tiers)
        self.in_force = InForce(tiers, 0, str(path), clock.wall_ms(), self._own_file)
        self._vote = (0, "")  # generation of the last proposal voted on, and the objection to it (empty: none)
        self._has_joined = False
        self._is_store_silent = False  # True: the store did not answer at the last read
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def has_newer_file(self) -> bool:
        """Return whether this part's file was changed after the tiers in force were set, and is not known already.

        A restart with the file that was put in force last leaves a change over HTTP as it is.
        """
        if self._own_file in (self.in_force.file, digest_of(self.in_force.tiers)):
            return False
        with contextlib.suppress(OSError):
            return 1000 * self._path.stat().st_mtime > self.in_force.set_ms
        return False

    async def __aenter__(self) -> Self:
        """Start to follow the tiers in the store.

        If the store answers, this process uses the store's tiers in force when this method returns.
        """
        await self._sync()
        self._tasks = [asyncio.create_task(self._store.listen(self._news.set)), asyncio.create_task(self._follow())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RedisError):  # if this fails, the part counts as gone when its last report expires
            await self._store.leave(self.part)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._news.wait()
            self._news.clear()
            await self._sync()

    async def _sync(self) -> None:
        """Use the tiers in force, vote on proposed tiers, and report both to the store.

        After any error, the follower continues: a process that does not vote would prevent every change of the tiers.
        """
        try:
            if not self._has_joined:
                await self._join()
                self._has_joined = True
            reading = await self._store.read()
            if reading.in_force is not None and reading.in_force.generation != self.in_force.generation:
                self._adopt(reading.in_force)
            if reading.proposed is not None and reading.proposed.generation != self._vote[0]:
                self._vote = (reading.proposed.generation, self._objection(reading.proposed))
            await self._store.report(Follower(self.part, self.in_force.generation, *self._vote))
            self._is_store_silent = False
        except RedisError as error:
            if not self._is_store_silent:
                log.warning("the store does not answer; the tiers stay as they are", error=str(error))
            self._is_store_silent = True
        except Exception:
            log.exception("following the tiers failed and will be tried again")

    async def _join(self) -> None:
        """Join the parts that follow the store. If this part is the first one, it puts its own file in force."""
        until_s = self._clock.now() + JOIN_S
        while self._clock.now() < until_s:
            others = [f for f in await self._store.followers() if f.part != self.part]
            if others and (await self._store.read()).in_force is not None:
                return
            content = self.in_force.tiers.document(defaults=False)
            now_ms = self._clock.wall_ms()
            document = await self._store.propose(content, self.in_force.source, now_ms, self._own_file)
            if document is None:
                await self._clock.sleep(POLL_S)
            elif any(f.part != self.part and f.generation for f in await self._store.followers()):
                return await self._store.withdraw(document)  # another part was faster
            else:  # reports before the commit, so that the next part to join sees this part
                await self._store.report(Follower(self.part, document.generation))
                await self._store.commit(document)
                return

    def _adopt(self, document: TierDocument) -> None:
        """Use `document`. If this is not possible, log why.

        The other parts may have agreed to the document while this process could not reach the store.
        """
        objection = self._objection(document)
        if objection:
            log.error("the tiers in force cannot be used here", generation=document.generation, reason=objection)
            return
        tiers = parse_tiers(document.content, document.source)
        if tiers != self.in_force.tiers:
            self._consumer.reconfigure(tiers)
            log.info("the tiers have changed", generation=document.generation, source=document.source)
        self.in_force = InForce(tiers, document.generation, document.source, document.set_ms, document.file)

    def _objection(self, document: TierDocument) -> str:
        try:
            return self._consumer.objection(parse_tiers(document.content, document.source))
        except TierConfigError as error:  # a part that runs another version of this program accepted it
            return str(error)


def digest_of(tiers: TierSet) -> str:
    """Return a digest that is the same for all files with the same content."""
    return hashlib.sha256(msgspec.json.encode(tiers.document(defaults=False), order="sorted")).hexdigest()
