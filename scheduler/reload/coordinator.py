"""Changes the tiers at run time, either on every gateway and worker of a store or on none.

A change has two steps. First a document is proposed, and every live part (a gateway or worker process) votes on it. If
no part objects, the document is put in force, and every part applies it. Knows documents, votes and timeouts; does not
know where a change comes from, or how its result is shown.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from redis.exceptions import RedisError

from scheduler.clock import Clock
from scheduler.config import TierConfigError, TierSet, load_tiers, parse_tiers
from scheduler.reload.follower import InForce, TierFollower, digest_of
from scheduler.reload.store import Follower, TierDocument, TierStore

log = structlog.get_logger()

POLL_S = 0.01  # seconds between two reads of the store while other parts vote or apply
OFFER_S, OFFERS = 10.0, 12  # seconds between two offers of a newer file, and their number: two minutes for a restart
TIMEOUT_S = 5.0  # seconds for all parts to vote on a change, and the same time again for all parts to apply it


@dataclass(frozen=True, slots=True)
class Applied:
    """The change succeeded: all `parts` use the tiers. `changed` is False if these tiers were already in force."""

    in_force: InForce
    parts: tuple[str, ...]
    changed: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The change was refused: the old tiers stay in force on every part."""

    message: str


@dataclass(frozen=True, slots=True)
class Late:
    """The change is late: the `parts` listed here did not answer in time.

    If `in_force` is True, the change is made, and these parts will follow. Otherwise nothing has changed.
    """

    parts: tuple[str, ...]
    in_force: bool


ChangeResult = Applied | Refused | Late
Depths = Callable[[Sequence[str]], Awaitable[Mapping[str, int]]]


class TierChanges:
    """Makes changes of the tiers on behalf of this process. The process's follower must be running."""

    def __init__(self, store: TierStore, follower: TierFollower, depths: Depths, path: Path, clock: Clock) -> None:
        """`depths` returns the number of waiting requests of each given tier. `reload` reads the file at `path`."""
        self._store = store
        self.follower = follower
        self._depths = depths
        self._path = path
        self._clock = clock

    async def parts(self) -> list[Follower]:
        """Return the reports of all live gateways and workers, sorted by name."""
        return await self._store.followers()

    async def reload(self) -> ChangeResult:
        """Read the tiers file again and put its tiers in force, as `change` does."""
        return await _logged(self._reload())

    async def change(self, content: object, source: str) -> ChangeResult:
        """Put `content` in force on every part, and log the result.

        Raises `TierConfigError` if `content` is not the content of a valid tiers file. Errors of the store's client are
        raised too.
        """
        return await _logged(self._parse(content, source))

    async def reload_on_signal(self) -> None:
        """Reload the tiers file as `reload` does, but only log the result and the errors."""
        try:
            await self.reload()
        except TierConfigError:
            pass
        except RedisError as error:
            log.error("the store does not answer; the old tiers stay in force", error=str(error))

    async def offer_file(self) -> None:
        """Put the tiers file in force, as `reload` does, if it is newer than the tiers in force.

        A part calls this after its start. While something stands against the file, it is offered again.
        """
        for _ in range(OFFERS):
            if self.follower.has_newer_file():
                await self.reload_on_signal()
            if not self.follower.has_newer_file():
                return
            await self._clock.sleep(OFFER_S)

    async def _reload(self) -> ChangeResult:
        tiers = await asyncio.to_thread(load_tiers, self._path)
        return await self._change(tiers, str(self._path), digest_of(tiers))

    async def _parse(self, content: object, source: str) -> ChangeResult:
        return await self._change(parse_tiers(content, source), source, self.follower.in_force.file)

    async def _change(self, tiers: TierSet, source: str, file: str) -> ChangeResult:
        until_s = self._clock.now() + TIMEOUT_S
        document = await self._propose_alone(tiers, source, file, until_s)
        if not isinstance(document, TierDocument):
            return document
        before = self.follower.in_force
        stopped = await self._vote(tiers, document, until_s)
        if stopped is not None:
            return stopped
        # A request may have been put into the queue of a removed tier just before the change. It would never be served.
        # In this case, all parts go back to the old tiers.
        result = await self._applied(document.generation, self._clock.now() + TIMEOUT_S, changed=True)
        if isinstance(result, Applied) and (reason := await self._reason_to_keep(before.tiers, tiers)):
            await self._change(before.tiers, before.source, before.file)
            return Refused(reason)
        return result

    async def _propose_alone(
        self, tiers: TierSet, source: str, file: str, until_s: float
    ) -> TierDocument | ChangeResult:
        """Propose `tiers` as soon as no other change is in progress, and return the proposed document.

        Return an result instead if `tiers` are in force already, or if the other change is still in progress at
        `until_s`.
        """
        while True:
            if (generation := await self._generation_of(tiers)) is not None:
                return await self._applied(generation, until_s, changed=False)
            if self._clock.now() >= until_s:
                return Refused("Another change of the tiers is in progress.")
            document = await self._propose(tiers, source, file)
            if document is not None:
                return document
            await self._clock.sleep(POLL_S)

    async def _vote(self, tiers: TierSet, document: TierDocument, until_s: float) -> ChangeResult | None:
        """Let all parts vote on `document`, and put it in force or withdraw it.

        Return None if `document` is in force, else the result.
        """
        is_in_force = False
        try:
            # Another change has just put the same tiers in force.
            if (generation := await self._generation_of(tiers)) is not None:
                return await self._applied(generation, until_s, changed=False)
            against = await self._against(tiers, document, until_s)
            if against is not None:
                return against
            is_in_force = await self._store.commit(document)
        finally:
            if not is_in_force:
                await asyncio.shield(self._store.withdraw(document))
        return None if is_in_force else Refused("The vote on the change took too long.")

    async def _generation_of(self, tiers: TierSet) -> int | None:
        """Return the generation of the document in force if its tiers are equal to `tiers`, else None."""
        in_force = (await self._store.read()).in_force
        is_same = in_force is not None and in_force.content == tiers.document(defaults=False)
        return in_force.generation if in_force is not None and is_same else None

    async def _propose(self, tiers: TierSet, source: str, file: str) -> TierDocument | None:
        try:
            return await self._store.propose(tiers.document(defaults=False), source, self._clock.wall_ms(), file)
        except OverflowError:
            raise TierConfigError(f"{source}: a number has more than 64 bits") from None

    async def _against(self, tiers: TierSet, document: TierDocument, until_s: float) -> Refused | Late | None:
        """Return why `document` cannot be put in force; None if nothing prevents this.

        The reason may be a waiting request in a removed tier, an objection, or a missing vote.
        """
        if reason := await self._reason_to_keep(self.follower.in_force.tiers, tiers):
            return Refused(reason)
        missing = await self._until_all(lambda f: f.looked_at >= document.generation, until_s)
        if missing:
            return Late(missing, in_force=False)
        objecting = [f for f in await self.parts() if f.looked_at == document.generation and f.objection]
        return Refused(" ".join(f"{f.part}: {f.objection}" for f in objecting)) if objecting else None

    async def _reason_to_keep(self, before: TierSet, after: TierSet) -> str:
        """Return a sentence about a removed tier whose queue is not empty; an empty string if there is no such tier."""
        removed = sorted(set(before.tiers) - set(after.tiers))
        depths = await self._depths(removed) if removed else {}
        tier = next((tier for tier, depth in depths.items() if depth), None)
        return f"The tier {tier!r} cannot be removed: {_requests(depths[tier])} in its queue." if tier else ""

    async def _applied(self, generation: int, until_s: float, *, changed: bool) -> ChangeResult:
        missing = await self._until_all(lambda f: f.generation >= generation, until_s)
        if missing:
            return Late(missing, in_force=True)
        parts = tuple(f.part for f in await self.parts())
        return Applied(self.follower.in_force, parts, changed)

    async def _until_all(self, has_done: Callable[[Follower], bool], until_s: float) -> tuple[str, ...]:
        """Wait until `has_done` is true of all live parts, including this one.

        Return the names of the parts for which it is still false at `until_s`.
        """
        while True:
            done = {f.part: has_done(f) for f in await self.parts()}
            missing = tuple(part for part, is_done in {self.follower.part: False, **done}.items() if not is_done)
            if not missing or self._clock.now() >= until_s:
                return missing
            await self._clock.sleep(POLL_S)


def _requests(count: int) -> str:
    return "1 request waits" if count == 1 else f"{count} requests wait"


async def _logged(change: Coroutine[Any, Any, ChangeResult]) -> ChangeResult:
    try:
        result = await change
    except TierConfigError as error:
        log.error("the tiers are refused; the old ones stay in force", reason=str(error))
        raise
    _log_result(result)
    return result


def _log_result(result: ChangeResult) -> None:
    match result:
        case Applied(in_force, parts, changed):
            event = "the tiers are in force everywhere" if changed else "the tiers are in force already"
            log.info(event, generation=in_force.generation, source=in_force.source, parts=list(parts))
        case Refused(message):
            log.error("the tiers are refused; the old ones stay in force", reason=message)
        case Late(parts, in_force):
            event = "parts do not use the new tiers yet" if in_force else "parts do not answer; nothing has changed"
            log.error(event, missing=list(parts))
