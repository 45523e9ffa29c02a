"""Min shares: the share of engine time that a tier gets even if higher tiers have enough work to fill every step.

A tier that has work and gets less than its min share has engine time due. Once that is worth a step, the tier is
served first. While an interactive tier is overloaded, a request that is near its deadline or has waited too long raises
the share of its tier: the SLO is lost then, and the deadline is not. The controller owns it.
"""

from collections.abc import Iterable, Mapping

from scheduler.config import Tier

# Seconds of engine time: more is never due to a tier that others were served before. So none gets a long burst
# afterwards.
MAX_DUE_S = 1.0
URGENT_SHARE = 0.5  # the largest share of engine time that a tier gets because of an urgent request, in an overload


class MinShares:
    """The min share of each tier, the engine time that is due to it, and its urgency."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._min_share = {tier.name: tier.min_share for tier in tiers}
        self._due_s = dict.fromkeys(self._min_share, 0.0)
        self._urgency = dict.fromkeys(self._min_share, 0.0)
        self.is_overload = False  # whether an interactive tier is overloaded

    def set_urgency(self, tier: str, urgency: float) -> None:
        """Set the urgency of a tier, limited to [0, 1]."""
        self._urgency[tier] = min(1.0, max(0.0, urgency))

    def urgency(self, tier: str) -> float:
        return self._urgency[tier]

    def share(self, tier: str) -> float:
        """Return the share of engine time that `tier` must get at present.

        This is its min share. In an overload, urgency raises it: with an urgency of 1, the tier gets `URGENT_SHARE`, or
        its min share if that is larger.
        """
        min_share, urgency = self._min_share[tier], self._urgency[tier] if self.is_overload else 0.0
        return min_share + max(0.0, URGENT_SHARE - min_share) * urgency

    def due_s(self, tier: str) -> float:
        """Return the engine time in seconds that is due to `tier` because it got less than its share."""
        return self._due_s[tier]

    def is_due(self, tier: str, step_s: float) -> bool:
        """Return whether so much time is due to `tier` that it fills a step of `step_s` seconds."""
        due_s = self._due_s[tier]
        return self.share(tier) > 0 and due_s > 0 and due_s >= min(step_s, MAX_DUE_S)

    def add_step(self, elapsed_s: float, used_s: Mapping[str, float], wanting: Iterable[str]) -> None:
        """Update what is due after a step. `used_s` is the engine time that each tier used of `elapsed_s` seconds.

        Only the `wanting` tiers have work; what is due to the other tiers stays the same.
        """
        for tier in wanting:
            due_s = self._due_s[tier] + self.share(tier) * elapsed_s - used_s.get(tier, 0.0)
            self._due_s[tier] = min(max(due_s, 0.0), MAX_DUE_S)

    def inherit(self, before: "MinShares") -> None:
        """Copy what was due to the tiers that both have."""
        for tier in self._due_s:
            self._due_s[tier] = before._due_s.get(tier, 0.0)
