"""What becomes of requests while no worker with an engine is alive: which are accepted, and how long they wait.

A request that finds none waits while a worker starts. Where workers are started on demand (`scales_from_zero`), it
also waits before one has begun to start, and bulk is always accepted. Knows the live workers and tiers; does not know
queues.
"""

from collections.abc import Callable

from scheduler.client.live_workers import LiveWorkers
from scheduler.clock import Clock
from scheduler.config import Tier, TierSet
from scheduler.registry.heartbeat_monitor import CHECK_S
from scheduler.request import Request

# Seconds without any worker after which open interactive requests fail. Together with the time in which a hung worker
# is noticed (its step counts as stuck after `scheduler.drivers.steps.driver.STUCK_S`), nobody waits for more than 10 s.
MAX_AWAY_S = 4.0
ASKED_S = 60.0  # seconds for which a request that found no worker counts as work for one


class EngineWait:
    def __init__(
        self,
        live: LiveWorkers,
        tiers: TierSet,
        clock: Clock,
        is_draining: Callable[[], bool],
        *,
        scales_from_zero: bool,
    ) -> None:
        self._live = live
        self._tiers = tiers
        self._clock = clock
        self._is_draining = is_draining
        self.scales_from_zero = scales_from_zero
        self._asked_s: float | None = None  # when the last request found no worker

    def reconfigure(self, tiers: TierSet) -> None:
        self._tiers = tiers

    def accepts(self, tier: str) -> bool:
        """Return whether a request of `tier` may be accepted: a worker is alive, or bulk work can wait for one."""
        is_bulk = tier in self._tiers.tiers and not self._tiers[tier].is_interactive
        return bool(self._live.engines) or (is_bulk and (self._live.has_engine or self.scales_from_zero))

    @property
    def was_asked(self) -> bool:
        """Whether a request has found no worker within the last minute."""
        return self._asked_s is not None and self._clock.now() - self._asked_s < ASKED_S

    def note_asked(self) -> None:
        """Note that a request has found no worker, and was answered in another way."""
        self._asked_s = self._clock.now()

    async def wait(self, request: Request) -> None:
        """Wait until `request` is accepted, for as long as a request of its tier may wait for a first token.

        Returns earlier if no worker starts, unless workers are started on demand. The live workers are read meanwhile,
        so this reads them only at first.
        """
        await self._live.look()
        end_s = self._clock.now() + self._patience_s(request)
        while not (self.accepts(request.tier) or self._is_draining()):
            self._asked_s = self._clock.now()
            if self._asked_s >= end_s or not (self._live.is_starting or self.scales_from_zero):
                return
            await self._clock.sleep(CHECK_S)

    def tiers_given_up(self) -> list[str]:
        """Return the interactive tiers whose open requests have been without a worker for too long."""
        return [tier.name for tier in self._tiers.tiers.values() if tier.is_interactive and self._is_given_up(tier)]

    def _is_given_up(self, tier: Tier) -> bool:
        patience_s = (tier.ttft_limit_s or tier.deadline_ms / 1000) if self.scales_from_zero else 0.0
        return self._live.were_away(max(MAX_AWAY_S, patience_s))

    def _patience_s(self, request: Request) -> float:
        """Return how long `request` may still wait for a first token: without a limit of its tier, to its deadline."""
        tier, waited_s = self._tiers.tiers.get(request.tier), (self._clock.wall_ms() - request.arrival_ms) / 1000
        if tier is not None and tier.ttft_limit_s is not None:
            return tier.ttft_limit_s - waited_s
        return (request.deadline_ms - request.arrival_ms) / 1000 - waited_s
