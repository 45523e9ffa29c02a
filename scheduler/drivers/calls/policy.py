"""When a batch starts, and which lanes fill it: wait until it is full, or until a timer runs out.

Pure: the time is an argument, and depths of lanes are all it sees. Knows tiers, lanes and the size of a batch; does not
know tasks, endpoints or the store. A call takes the same time however many of its items are padding, so a batch that is
not full waits for more tasks, but never so long that an interactive task would miss its tier's SLO by it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.step_time.ewma import Ewma
from scheduler.clock import NEVER_S
from scheduler.config import Tier, TierSet
from scheduler.control.min_share import MinShares
from scheduler.control.windows import ArrivalRate
from scheduler.tasks.task import group_size, isolated_lanes, tier_of

# Seconds that a batch which is not full waits for more tasks: the former when few come, the latter when that wait fills
# a batch. From the specification of the service.
MIN_WAIT_S, MAX_WAIT_S = 0.05, 0.1
ARRIVAL_TAU_S = 1.0  # time constant of the rate of arrivals
CALL_WEIGHT = 0.2  # weight of the newest call in the average time of a call
SLO_SHARE = 0.9  # share of an SLO within which an interactive task should end; the rest is for what was not foreseen
# While other tasks wait, at most one of so many calls is for isolated tasks: the former as long as they are few, the
# latter when more than `FEW_ISOLATED_BATCHES` batches of them wait.
ISOLATED_EVERY, MANY_ISOLATED_EVERY = 5, 2
FEW_ISOLATED_BATCHES = 2
# Tasks that may be isolated at once, in batches. If more calls fail, the items are hardly the cause, and isolated tries
# would cost more calls than there are: further tasks are tried again in normal batches.
MAX_ISOLATED_BATCHES = 16


@dataclass(frozen=True, slots=True)
class LaneWait:
    """The tasks that wait in a lane. `oldest_s` is the arrival of the oldest one, by the monotonic clock."""

    count: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A call that should be made now: how many tasks to claim from each lane, in this order."""

    limits: Mapping[str, int]
    is_isolated: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """No call yet. The batch starts at `until_s` if it is not full before."""

    until_s: float


class BatchPolicy:
    def __init__(self, tiers: TierSet, batch: int, now: float) -> None:
        self.batch = batch
        self._arrivals = ArrivalRate(ARRIVAL_TAU_S)
        self._arrivals_per_s = 0.0
        self._num_seen = 0  # tasks that waited at the last look, without those claimed since
        self._call_s: Ewma | None = None
        self._free_since_s = now
        self._calls_since_isolated = 0
        self._num_isolated = 0
        self.waiting_tiers: frozenset[str] = frozenset()  # tiers with waiting tasks at the last look
        self._min_shares = MinShares(tiers.by_priority)
        self._tiers = tiers.by_priority

    def reconfigure(self, tiers: TierSet) -> None:
        min_shares = MinShares(tiers.by_priority)
        min_shares.inherit(self._min_shares)
        self._min_shares, self._tiers = min_shares, tiers.by_priority

    @property
    def lanes(self) -> list[str]:
        """All lanes from which a call may be filled."""
        return [lane for tier in self._tiers for lane in (tier.name, *isolated_lanes(tier.name))]

    @property
    def call_s(self) -> float:
        """The average time of a call in seconds; 0 before the first one."""
        return self._call_s.value if self._call_s is not None else 0.0

    @property
    def wait_s(self) -> float:
        """How long a batch that is not full waits at present: the longer, the more of it the wait may fill."""
        gained = min(1.0, self._arrivals_per_s * MAX_WAIT_S / self.batch)
        return MIN_WAIT_S + (MAX_WAIT_S - MIN_WAIT_S) * gained

    @property
    def may_isolate(self) -> bool:
        """Whether tasks of a failed call should be tried again in calls of their own."""
        return self._num_isolated < MAX_ISOLATED_BATCHES * self.batch

    def observe(self, waiting: Mapping[str, LaneWait], now: float) -> None:
        """Take note of the tasks that wait now, from which the rate of arrivals is computed."""
        main = sum(waiting[tier.name].count for tier in self._tiers if tier.name in waiting)
        self._num_isolated = sum(wait.count for wait in waiting.values()) - main
        self.waiting_tiers = frozenset(tier_of(lane) for lane in waiting)
        self._arrivals.add(max(0, main - self._num_seen))
        self._num_seen = main
        self._arrivals_per_s = self._arrivals.update(now)

    def decide(self, waiting: Mapping[str, LaneWait], now: float) -> CallPlan | Wait:
        """Return the next call, or how long to wait for it. `waiting` has the lanes in which tasks wait."""
        main = {tier: waiting[tier.name] for tier in self._tiers if tier.name in waiting}
        isolated = next((lane for tier in self._tiers for lane in isolated_lanes(tier.name) if lane in waiting), None)
        are_few = self._num_isolated <= FEW_ISOLATED_BATCHES * self.batch
        every = ISOLATED_EVERY if are_few else MANY_ISOLATED_EVERY
        if isolated is not None and (not main or self._calls_since_isolated >= every - 1):
            return CallPlan({isolated: group_size(isolated, self.batch)}, is_isolated=True)
        due_s = self._due_s(main)
        return CallPlan(self._limits({t: w.count for t, w in main.items()})) if now >= due_s else Wait(due_s)

    def is_due(self, waiting: Mapping[str, LaneWait], now: float) -> bool:
        """Return whether a batch of the `waiting` tasks of main lanes should start now."""
        return now >= self._due_s({tier: waiting[tier.name] for tier in self._tiers if tier.name in waiting})

    def note_claimed(self, count: int) -> None:
        """Take note that `count` tasks of main lanes were claimed here; a negative number was given back."""
        self._num_seen = max(0, self._num_seen - count)

    def end_call(
        self, plan: CallPlan, slots: Mapping[str, int], wanting: Mapping[str, LaneWait], took_s: float, now: float
    ) -> None:
        """Take note of a call that has ended: which tier had how many `slots`, which lanes were `wanting` some."""
        if self._call_s is None:
            self._call_s = Ewma(CALL_WEIGHT, took_s)
        self._call_s.add(took_s)
        self._free_since_s = now
        self.note_turn(plan)
        used_s = {tier: took_s * count / self.batch for tier, count in slots.items()}
        self._min_shares.add_step(took_s, used_s, [t.name for t in self._tiers if t.name in wanting])

    def note_turn(self, plan: CallPlan) -> None:
        """Take note of whose turn a call was. Enough for one that found the endpoint busy: its time tells nothing."""
        self._calls_since_isolated = 0 if plan.is_isolated else self._calls_since_isolated + 1

    def _due_s(self, main: Mapping[Tier, LaneWait]) -> float:
        """Return when a batch of these tasks starts; the time before which it has started if it is full."""
        if sum(wait.count for wait in main.values()) >= self.batch:
            return -NEVER_S
        return min((self._tier_due_s(tier, wait.oldest_s) for tier, wait in main.items()), default=NEVER_S)

    def _tier_due_s(self, tier: Tier, oldest_s: float) -> float:
        """Return when the oldest task of a tier has waited long enough for others.

        It waits since it came, or since the endpoint became free if that was later.
        """
        pinned_ms = tier.pinned.max_wait_ms
        wait_s = self.wait_s if pinned_ms is None else pinned_ms / 1000
        due_s = max(oldest_s, self._free_since_s) + wait_s
        if tier.slo.ttft_p99_ms is not None:
            due_s = min(due_s, oldest_s + SLO_SHARE * tier.slo.ttft_p99_ms / 1000 - self.call_s)
        return due_s

    def _limits(self, counts: Mapping[Tier, int]) -> dict[str, int]:
        """Return the slots of each tier: first what min shares guarantee, the rest by priority."""
        limits, left = dict[str, int](), self.batch
        for tier, count in counts.items():  # after a very long call, the guarantees together exceed a batch
            due_s = self._min_shares.due_s(tier.name)
            limits[tier.name] = min(count, math.floor(due_s / self.call_s * self.batch) if self.call_s else 0, left)
            left -= limits[tier.name]
        for tier, count in counts.items():
            more = min(left, count - limits[tier.name])
            limits[tier.name] += more
            left -= more
        return limits


def without(waiting: Mapping[str, LaneWait], counts: Mapping[str, int]) -> dict[str, LaneWait]:
    """Return what waits in each lane beyond `counts` tasks that were claimed."""
    left = {lane: replace(wait, count=wait.count - counts.get(lane, 0)) for lane, wait in waiting.items()}
    return {lane: wait for lane, wait in left.items() if wait.count > 0}
