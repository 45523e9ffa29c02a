"""Claims requests from the queue: as soon as a request is put, and whenever there may be room for more requests.

Requests are also claimed while the engine computes, so that a new request is in the very next step. Bulk that this
worker has claimed and cannot begin goes back as soon as another worker has nothing to do. Knows the core's limits and
the queue; `RequestIntake` takes the requests that were claimed or cancelled, and `Takeover` those that another worker
has held before.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set

import structlog

from scheduler.clock import Clock
from scheduler.config import Tier
from scheduler.events.base import EventChannel
from scheduler.holdings.claims import due_limits, early_limits
from scheduler.queue.base import Queue
from scheduler.request import Claimed, EventKind, Lease, TokenEvent
from scheduler.request_state import RequestState
from scheduler.store.outage import StoreOutage
from scheduler.worker.core import WorkerCore
from scheduler.worker.leases import LEASE_S
from scheduler.worker.request_intake import RequestIntake

log = structlog.get_logger()

# Seconds between two looks at the requests that were cancelled.
LISTEN_S = 0.5
# Seconds for which a worker claims nothing after it got a request of another vocabulary: others get it meanwhile.
FOREIGN_S = 10.0
FOREIGN = (
    "the gateways' model has another vocabulary than this worker's, so their token ids mean other texts here: give "
    "gateways and workers of one model the same files"
)


class Takeover:
    """Asks what was received of requests that another worker has held before, before they begin here.

    Their streams go on from these tokens, also where this engine would give other ones from the start. The answer is a
    request that is back in the queue with these tokens (`scheduler.queue.base.Queue.resume`). If it does not come, the
    lease ends, and the next claim asks again.
    """

    def __init__(self, queue: Queue, events: EventChannel, intake: RequestIntake) -> None:
        self._queue = queue
        self._events = events
        self._intake = intake

    async def ask(self, claimed: Sequence[Claimed]) -> None:
        """Ask the gateways of claimed requests. Cancel those whose gateways are gone."""
        self._intake.release([c.request.id for c in claimed])  # what an older lease of this worker has left
        questions: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        for c in claimed:
            questions[c.request.reply_to].append(TokenEvent(c.request.id, EventKind.TAKEN_OVER, fence=c.fence))
        for reply_to in await self._events.publish(questions):
            await self._queue.cancel([event.request_id for event in questions[reply_to]])


class Claimer:
    def __init__(
        self,
        core: WorkerCore,
        queue: Queue,
        intake: RequestIntake,
        takeover: Takeover,
        outage: StoreOutage,
        clock: Clock,
        is_stuck: Callable[[], bool],
        vocabulary: str = "",
    ) -> None:
        """A worker that `is_stuck` claims nothing. `vocabulary` is that of its model."""
        self._core = core
        self._is_stuck = is_stuck
        self._queue = queue
        self._intake = intake
        self._takeover = takeover
        self._outage = outage
        self._clock = clock
        self._room = asyncio.Event()
        self._waits_for: Set[str] | None = None  # the tiers of whose next request the queue tells; None: unknown
        self._load = 0  # how busy this worker is, as the queue knows it
        self._unbegun: frozenset[str] = frozenset()  # ids of bulk requests that had not begun at the last look
        self._gave_back: frozenset[str] = frozenset()  # tiers of which this worker claims nothing until the next look
        self._crowded: Sequence[Tier] = ()  # bulk tiers with requests in the queue at the last look
        self._is_open = True
        self._vocabulary = vocabulary
        self._foreign_until_s = -math.inf

    @property
    def why_idle(self) -> str:
        """Why the worker claims nothing, though it could; an empty string if it does."""
        return FOREIGN if self._clock.now() < self._foreign_until_s else ""

    def note_room(self) -> None:
        """Make `run` claim again, because there may be room for more requests."""
        self._room.set()

    async def review(self, depths: Mapping[str, int]) -> None:
        """Do what is due from time to time. `depths` is the number of requests in the queue, by tier."""
        if crowded := [t for t in self._core.held.tiers if depths.get(t.name) and not t.is_interactive]:
            self._crowded = crowded
            self.note_room()
        if self._gave_back or any(depths.get(tier) for tier in self._waits_for or ()):  # or a wake-up was lost
            self._waits_for, self._gave_back = None, frozenset()
            self.note_room()
        bulk = [tier.name for tier in self._core.held.tiers if not tier.is_interactive and not depths.get(tier.name)]
        await self._outage.attempt(self._share(bulk))

    async def _share(self, tiers: Sequence[str]) -> None:
        """Give idle workers their shares of what waits here, in those of `tiers` where some has waited for two looks.

        What would begin last goes back. Nothing more is claimed of its tiers until the next look, so that the idle
        workers get it.
        """
        table, before = self._core.held.table, self._unbegun
        self._unbegun = frozenset(state.id for tier in tiers for state in table.waiting(tier))
        late = [tier for tier in tiers if any(state.id in before for state in table.waiting(tier))]
        given: list[RequestState] = []
        for tier, num_idle in (await self._queue.idle_workers(late)).items() if late else ():
            waiting = list(table.waiting(tier))
            given += waiting[len(waiting) // (num_idle + 1) :] if num_idle else ()
        self._gave_back = frozenset(state.tier.name for state in given)
        if given:
            self._intake.release([state.id for state in given])
            await self._queue.release([state.lease for state in given])

    def close(self) -> None:
        """Claim no more requests. Cancelled requests are still dropped."""
        self._is_open = False
        self.note_room()

    async def run(self) -> None:
        """Claim requests and drop cancelled requests, until this task is cancelled."""
        work = asyncio.create_task(self._queue.wait_for_work(LISTEN_S))
        room = asyncio.create_task(self._room.wait())
        try:
            while True:
                await asyncio.wait((work, room), return_when=asyncio.FIRST_COMPLETED)
                if room.done():
                    self._room.clear()
                    room = asyncio.create_task(self._room.wait())
                if work.done():
                    if work.result():
                        self._waits_for = None
                    work = asyncio.create_task(self._queue.wait_for_work(LISTEN_S))
                self._intake.drop(self._queue.cancelled())
                await self._outage.attempt(self._claim())
        finally:
            work.cancel()
            room.cancel()

    @property
    def _may_claim(self) -> bool:
        return self._is_open and not self._is_stuck() and not self.why_idle

    async def _claim_early(self, limits: Mapping[str, int]) -> None:
        """Claim the bulk requests that go before what runs here, although no slot is free.

        It is done from time to time instead of waiting for them: whoever waits for a tier gets its share of the tier.
        """
        full = [t for t in self._crowded if t.name not in limits and t.name not in self._gave_back]
        self._crowded = ()
        if self._may_claim and (due := early_limits(full, self._core.held.table)):
            await self._take(await self._queue.claim(dict.fromkeys(due, 0), LEASE_S, due=due))

    async def _claim(self) -> None:
        """Claim, unless the queue will wake this worker exactly for the tiers that it has room for.

        A worker whose load has halved since the last claim claims again, so that it is woken before busier ones. One
        that was woken without room claims nothing, so that the next one is woken.
        """
        held = self._core.held
        limits = self._core.claim_limits(self._clock.now()) if self._may_claim else {}
        limits = {tier: limit for tier, limit in limits.items() if tier not in self._gave_back}
        await self._claim_early(limits)
        due = due_limits([t for t in held.tiers if t.name in limits], held.table, self._clock.wall_ms())
        wanted = {tier: limit + (due[tier].requests if tier in due else 0) for tier, limit in limits.items()}
        wanted = {tier: number for tier, number in wanted.items() if number}
        load = 1 + held.num_interactive if len(held) else 0
        if wanted.keys() == self._waits_for and self._load < max(1, 2 * load):
            return
        self._waits_for = None
        without_room = {tier.name: 0 for tier in held.tiers if tier.name not in limits}
        claimed = await self._take(await self._queue.claim({**limits, **without_room}, LEASE_S, load, due))
        got = Counter(c.request.tier for c in claimed)
        self._waits_for = {tier for tier in wanted if got[tier] < wanted[tier]}
        self._load = load + len(claimed)

    async def _take(self, found: Sequence[Claimed]) -> Sequence[Claimed]:
        """Let the core have claimed requests. Return them, without those that went back."""
        claimed = await self._own(found)
        taken_over = {c.request.id: c for c in claimed if self._core.held.must_ask(c)}
        if ready := [c for c in claimed if c.request.id not in taken_over]:
            self._intake.accept(ready)
        if taken_over:
            await self._takeover.ask(list(taken_over.values()))
            self.note_room()  # it holds less than the queue knows
        return claimed

    async def _own(self, claimed: Sequence[Claimed]) -> Sequence[Claimed]:
        """Give back what was encoded with another vocabulary, and claim nothing for a while. Return the others."""
        foreign = {c.request.id: c for c in claimed if self._is_foreign(c)}
        if not foreign:
            return claimed
        log.error("the worker claims nothing for a while", reason=FOREIGN, requests=len(foreign))
        self._foreign_until_s = self._clock.now() + FOREIGN_S
        await self._queue.release([Lease(c.request.id, c.fence) for c in foreign.values()])
        return [c for c in claimed if c.request.id not in foreign]

    def _is_foreign(self, claimed: Claimed) -> bool:
        return bool(self._vocabulary) and claimed.request.vocabulary not in ("", self._vocabulary)
