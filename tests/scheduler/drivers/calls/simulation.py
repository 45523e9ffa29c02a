"""One endpoint in virtual time: the shipped policy, tasks that come at random, calls that take a fixed time."""

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from scheduler.config import TierSet
from scheduler.drivers.calls.policy import BatchPolicy, CallPlan, LaneWait, Wait, without

LOOK_S = 0.002  # seconds between two looks at the queue while a batch waits: wake-ups come about as often


@dataclass(slots=True)
class Simulated:
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    batches: list[dict[str, int]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)  # the policy's longest wait, at the start of each call

    @property
    def efficiency(self) -> float:
        """The number of tasks in a call, on average."""
        return sum(sum(batch.values()) for batch in self.batches) / len(self.batches)

    def p99_s(self, tier: str) -> float:
        return sorted(self.latencies_s[tier])[int(0.99 * len(self.latencies_s[tier]))]


def poisson(per_s: float, seconds: float, seed: int) -> Iterator[float]:
    draw, at_s = random.Random(seed), 0.0
    while (at_s := at_s + draw.expovariate(per_s)) < seconds:
        yield at_s


def simulate(tiers: TierSet, batch: int, call_s: float, arrivals: Mapping[str, list[float]]) -> Simulated:
    """Run until all `arrivals` (times in ascending order, by tier) are served."""
    done, now = Simulated(), 0.0
    policy = BatchPolicy(tiers, batch, now)
    left = {tier.name: list(arrivals.get(tier.name, [])) for tier in tiers.by_priority}
    while any(left.values()):
        come = {tier: bisect_right(times, now) for tier, times in left.items()}
        waiting = {tier: LaneWait(count, left[tier][0]) for tier, count in come.items() if count}
        policy.observe(waiting, now)
        match policy.decide(waiting, now):
            case CallPlan(limits):
                slots = {tier: min(n, come[tier]) for tier, n in limits.items() if n}
                done.waits_s.append(policy.wait_s)
                now += call_s
                for tier, count in slots.items():
                    done.latencies_s[tier] += [now - t for t in left[tier][:count]]
                    del left[tier][:count]
                done.batches.append(slots)
                policy.note_claimed(sum(slots.values()))
                policy.end_call(CallPlan(limits), slots, without(waiting, slots), call_s, now)
            case Wait():
                now = min([now + LOOK_S, *(times[0] for times in left.values() if times and times[0] > now)])
    return done
