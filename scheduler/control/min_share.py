"""Min shares: the share of engine time that a tier gets even under a flood from above, counted as a deficit.

A tier that has work and gets less than its share builds up a deficit; once that is worth a step, the tier goes first.
Work that nears its deadline, or has waited too long, raises its tier's share. Owner: the controller.
"""

from collections.abc import Iterable, Mapping

from scheduler.config import Tier

MAX_DEFICIT_S = 1.0  # of engine time: no long burst follows a long flood
URGENT_SHARE = 0.5  # of engine time: the largest share, where work would miss its deadline otherwise


class DeficitCounter:
    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._min_share = {tier.name: tier.floor for tier in tiers}
        self._deficit_s = dict.fromkeys(self._min_share, 0.0)
        self._urgency = dict.fromkeys(self._min_share, 0.0)

    def set_urgency(self, tier: str, urgency: float) -> None:
        """`urgency` in [0, 1]. 0: no work is urgent; 1: the tier needs the largest share that it may get."""
        self._urgency[tier] = min(1.0, max(0.0, urgency))

    def share(self, tier: str) -> float:
        """Return the share of engine time that `tier` is to get at present."""
        min_share = self._min_share[tier]
        return min_share + max(0.0, URGENT_SHARE - min_share) * self._urgency[tier]

    def deficit_s(self, tier: str) -> float:
        return self._deficit_s[tier]

    def has_deficit(self, tier: str, step_s: float) -> bool:
        """Return whether the deficit is worth a step of `step_s` seconds."""
        return self.share(tier) > 0 and self._deficit_s[tier] >= min(step_s, MAX_DEFICIT_S)

    def add_step(self, elapsed_s: float, used_s: Mapping[str, float], wanting: Iterable[str]) -> None:
        """Count a step of `elapsed_s`, of which each tier used so much; only `wanting` tiers have work."""
        for tier in wanting:
            deficit_s = self._deficit_s[tier] + self.share(tier) * elapsed_s - used_s.get(tier, 0.0)
            self._deficit_s[tier] = min(max(deficit_s, 0.0), MAX_DEFICIT_S)

    def take_over(self, before: "DeficitCounter") -> None:
        """Go on with the deficits of `before`, for the tiers that are in both."""
        for tier in self._deficit_s:
            self._deficit_s[tier] = before._deficit_s.get(tier, 0.0)
