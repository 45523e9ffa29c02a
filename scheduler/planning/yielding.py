"""Which interactive requests yield: they run as bulk does, beside others whom the steps are planned for.

A request yields while a request of a higher interactive tier is there. In one tier, all requests of a key that has more
than `OWN_REQUESTS` yield while there are requests of another key that has used less of the engine. So a key that floods
its tier gets what others leave, and all of it where it is alone. Two keys that both want more than half get half each,
or shares in proportion to their weights, since what one has used more makes it the one that yields.

Knows requests and what their runs cost; does not know how plans treat those that yield.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from scheduler.clock import NEVER_S
from scheduler.config import Tier
from scheduler.holdings.request_table import RequestTable
from scheduler.request import OWN_REQUESTS
from scheduler.request_state import RequestState

# Seconds of engine time, a long answer: a key with few requests goes first until it has used so much more than one with
# many. A new key with many is owed as much by the one that has used the most.
MAX_OWED_S = 10.0


class Yielding:
    """What the keys of each interactive tier have used for each unit of their weights. Owned by a driver."""

    def __init__(self, spared: int = 0) -> None:
        """`spared` requests of each key or lower tier that has to yield, the first in its order, do not yield."""
        self._spared = spared
        self._used_s: defaultdict[str, dict[str, float]] = defaultdict(dict)  # by tier and key: engine time

    def charge(self, state: RequestState, seconds: float) -> None:
        """Add engine time that a request took, divided by the weight of its key, to what the key has used."""
        used_s = self._used_s[state.tier.name]
        used_s[state.request.owner] = used_s.get(state.request.owner, 0.0) + seconds / state.request.weight

    def find(
        self, tiers: Sequence[Tier], table: RequestTable, expected: Mapping[str, Collection[str]] | None = None
    ) -> set[str]:
        """Return the ids of the requests that yield now. `tiers` are sorted from the highest priority to the lowest.

        `expected` holds, by tier, keys that count as there although the table may have no request of theirs.
        """
        found: set[str] = set()
        is_highest = True
        for tier in tiers:
            owners = (expected or {}).get(tier.name, ())
            if not tier.is_interactive or not (table.count(tier.name) or owners):
                continue
            if not is_highest:
                states = sorted(table.of_tier(tier.name), key=lambda s: s.edf_key)
                found.update(state.id for state in states[self._spared :])
            elif table.num_owners(tier.name) + len(owners) > 1:
                found.update(self._beyond_shares(tier.name, table, owners))
            is_highest = False
        return found

    def _beyond_shares(self, tier: str, table: RequestTable, expected: Collection[str]) -> list[str]:
        of_key = defaultdict[str, list[RequestState]](list, {owner: [] for owner in expected})
        for state in table.of_tier(tier):
            of_key[state.request.owner].append(state)
        used_s = self._used_by(tier, of_key)
        # A key with few requests is owed a long answer by those with many, whoever of them came first.
        ahead_s = {o: used_s[o] - (MAX_OWED_S if len(s) <= OWN_REQUESTS else 0.0) for o, s in of_key.items()}
        found: list[str] = []
        for owner, states in of_key.items():
            others_s = min((s for other, s in ahead_s.items() if other != owner), default=NEVER_S)
            if len(states) > OWN_REQUESTS and others_s <= used_s[owner]:
                found += (s.id for s in sorted(states, key=lambda s: s.edf_key)[self._spared :])
        return found

    def _used_by(self, tier: str, present: defaultdict[str, list[RequestState]]) -> dict[str, float]:
        """Return what keys have used, those that are `present` and those that have used more than the least counted."""
        known = self._used_s[tier]
        most_s = max((known[owner] for owner in present if owner in known), default=0.0)
        owed_s, least_s = most_s - MAX_OWED_S, most_s - 2 * MAX_OWED_S
        used_s = {owner: seconds for owner, seconds in known.items() if seconds > least_s}
        new_s = {owner: owed_s if len(states) > OWN_REQUESTS else most_s for owner, states in present.items()}
        used_s |= {owner: max(known.get(owner, start_s), least_s) for owner, start_s in new_s.items()}
        self._used_s[tier] = used_s
        return used_s
