"""Follows the tiers that the store has in force, in one process; and votes on those that somebody proposes.

A part that starts beside others takes what they have in force; the first one puts its own file in force. So a change
made at run time lasts as long as anybody is there, and a file always wins at a start from nothing. Knows documents and
votes; what the tiers are used for is its `Subject`'s matter, and changes come from elsewhere (`tier_change`).
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import structlog
from redis.exceptions import RedisError

from scheduler.clock import Clock
from scheduler.config import TierConfigError, TierSet, parse_tiers
from scheduler.reload.store import Follower, TierDocument, TierStore

log = structlog.get_logger()

REPORT_S = 1.0  # between two looks without news
JOIN_S = 5.0  # for whoever decides at this moment to come to an end
POLL_S = 0.01


class Subject(Protocol):
    """What uses the tiers in this process."""

    def objection(self, tiers: TierSet) -> str:
        """A sentence that says why `tiers` cannot be had here now; empty: they can."""
        ...

    def reconfigure(self, tiers: TierSet) -> None:
        """Use `tiers` from now on."""
        ...


@dataclass(frozen=True, slots=True)
class InForce:
    """What this process follows. `generation` 0: the store has not been heard yet."""

    tiers: TierSet
    generation: int
    source: str
    set_ms: int


class TierFollower:
    """Owner of what this process has in force. Use as `async with`: it follows inside."""

    def __init__(self, store: TierStore, subject: Subject, part: str, tiers: TierSet, path: Path, clock: Clock) -> None:
        """`part` is this process's name among the store's, in words; `tiers` were read from `path`, and the subject
        uses them already."""
        self._store = store
        self._subject = subject
        self._clock = clock
        self.part = part
        self.in_force = InForce(tiers, 0, str(path), clock.wall_ms())
        self._vote = (0, "")  # on which generation, and what there is against it
        self._has_joined = False
        self._is_away = False  # the store, at the last look
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Where the store answers, what is in force there is so here when this returns."""
        await self._look()
        self._tasks = [asyncio.create_task(self._store.listen(self._news.set)), asyncio.create_task(self._follow())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RedisError):  # it counts as gone when its last report has lapsed
            await self._store.leave(self.part)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._news.wait()
            self._news.clear()
            await self._look()

    async def _look(self) -> None:
        """Take what is in force, vote on what is proposed, report both. No error ends the following: a process that
        is silent for ever would keep all others from any change."""
        try:
            if not self._has_joined:
                await self._join()
                self._has_joined = True
            reading = await self._store.read()
            if reading.in_force is not None and reading.in_force.generation != self.in_force.generation:
                self._take(reading.in_force)
            if reading.proposed is not None and reading.proposed.generation != self._vote[0]:
                self._vote = (reading.proposed.generation, self._objection(reading.proposed))
            await self._store.report(Follower(self.part, self.in_force.generation, *self._vote))
            self._is_away = False
        except RedisError as error:
            if not self._is_away:
                log.warning("the store does not answer; the tiers stay as they are", error=str(error))
            self._is_away = True
        except Exception:
            log.exception("following the tiers failed; it goes on")

    async def _join(self) -> None:
        """As the first part to come, put the own file in force."""
        until_s = self._clock.now() + JOIN_S
        while self._clock.now() < until_s:
            others = [f for f in await self._store.followers() if f.part != self.part]
            if others and (await self._store.read()).in_force is not None:
                return
            content = self.in_force.tiers.document(defaults=False)
            document = await self._store.propose(content, self.in_force.source, self._clock.wall_ms())
            if document is None:
                await self._clock.sleep(POLL_S)
            elif any(f.part != self.part and f.generation for f in await self._store.followers()):
                return await self._store.withdraw(document)  # another one was faster
            else:  # reported first, so that whoever comes next sees that somebody is here
                await self._store.report(Follower(self.part, document.generation))
                await self._store.commit(document)
                return

    def _take(self, document: TierDocument) -> None:
        """Others may have agreed to it while this process was away: what it cannot use is left, and said."""
        objection = self._objection(document)
        if objection:
            log.error("the tiers in force cannot be used here", generation=document.generation, reason=objection)
            return
        tiers = parse_tiers(document.content, document.source)
        if tiers != self.in_force.tiers:
            self._subject.reconfigure(tiers)
            log.info("the tiers have changed", generation=document.generation, source=document.source)
        self.in_force = InForce(tiers, document.generation, document.source, document.set_ms)

    def _objection(self, document: TierDocument) -> str:
        try:
            return self._subject.objection(parse_tiers(document.content, document.source))
        except TierConfigError as error:  # another version of this program found nothing wrong
            return str(error)
