"""Bulk's floor: the share of engine time that a tier gets even under a flood from above, kept as a debt.

Knows shares and seconds; not sequences, not steps. Work that nears its deadline, or has waited too long, raises the
share: its tier is then owed more, and sooner. Owner: the controller.
"""

from collections.abc import Iterable, Mapping

from scheduler.config import Tier

DEBT_MAX_S = 1.0  # of engine time: no burst after a long flood
URGENT_SHARE = 0.5  # of the time, at most, for work that would miss its deadline otherwise


class DeficitCounter:
    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._floor = {tier.name: tier.floor for tier in tiers}
        self._deficit_s = dict.fromkeys(self._floor, 0.0)
        self._urgency = dict.fromkeys(self._floor, 0.0)

    def set_urgency(self, tier: str, urgency: float) -> None:
        """0: nothing presses; 1: all the time that may be given is needed."""
        self._urgency[tier] = min(1.0, max(0.0, urgency))

    def share(self, tier: str) -> float:
        """Of the engine's time, that `tier` is owed at present."""
        floor = self._floor[tier]
        return floor + max(0.0, URGENT_SHARE - floor) * self._urgency[tier]

    def deficit_s(self, tier: str) -> float:
        return self._deficit_s[tier]

    def has_deficit(self, tier: str, step_s: float) -> bool:
        """The debt is worth a step of `step_s` seconds."""
        return self.share(tier) > 0 and self._deficit_s[tier] >= min(step_s, DEBT_MAX_S)

    def enter(self, elapsed_s: float, used_s: Mapping[str, float], wanting: Iterable[str]) -> None:
        """A step of `elapsed_s`, of which each tier used so much; `wanting` tiers have work."""
        for tier in wanting:
            owed_s = self._deficit_s[tier] + self.share(tier) * elapsed_s - used_s.get(tier, 0.0)
            self._deficit_s[tier] = min(max(owed_s, 0.0), DEBT_MAX_S)

    def take_over(self, before: "DeficitCounter") -> None:
        for tier in self._deficit_s:
            self._deficit_s[tier] = before._deficit_s.get(tier, 0.0)
