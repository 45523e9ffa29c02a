"""The request table: the requests that a worker holds, indexed by tier and by the kind of work that they need next.

With the index, a plan looks only at the states that it can use, even if many other requests wait. Knows states and
their orders; decides nothing. `StepCore` owns the table. The core and its parts call `update` whenever the index
entry of a state may have changed. All other code only reads the table.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from sortedcontainers import SortedDict

from scheduler.config import Tier
from scheduler.request_state import RequestState, Status

# The sort key of a state without blocks: preempted requests come before waiting requests, each group by deadline.
_NotResidentKey = tuple[bool, tuple[int, int, str]]


class _Group(Enum):
    """The part of a tier's index to which a state belongs."""

    DECODES = auto()
    PREFILLS = auto()
    NOT_RESIDENT = auto()


@dataclass(slots=True)
class _TierIndex:
    """The states of one tier, in groups. `decodes` starts with the sequence whose last run is the longest ago."""

    decodes: OrderedDict[str, RequestState] = field(default_factory=OrderedDict)
    prefills: dict[str, RequestState] = field(default_factory=dict)
    not_resident: "SortedDict[_NotResidentKey, RequestState]" = field(default_factory=SortedDict)
    owners: Counter[str] = field(default_factory=Counter)  # number of requests, by the name of their key

    @property
    def num_resident(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def num_preempted(self) -> int:
        return int(self.not_resident.bisect_left((True,))) if self.not_resident else 0

    def residents(self) -> Iterator[RequestState]:
        yield from self.decodes.values()
        yield from self.prefills.values()


class RequestTable:
    """All requests that the worker holds, with an index by tier and group."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._index = {tier.name: _TierIndex() for tier in self._tiers}
        self._states: dict[str, RequestState] = {}
        self._entries: dict[str, tuple[_Group, _NotResidentKey]] = {}  # by request id
        self._preemption_exhausted: dict[str, RequestState] = {}  # residents that keep room for all their tokens
        self._last_run: Sequence[str] = ()
        self._boosted: list[RequestState] = []
        self._yielding: frozenset[str] = frozenset()

    # -- all requests ------------------------------------------------------------------------------------------

    @property
    def states(self) -> Mapping[str, RequestState]:
        """The states of all requests, by request id."""
        return self._states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def count(self, tier: str) -> int:
        index = self._index[tier]
        return len(index.decodes) + len(index.prefills) + len(index.not_resident)

    def num_owners(self, tier: str) -> int:
        """Return how many API keys have requests of the tier in the table."""
        return len(self._index[tier].owners)

    def tiers_held(self) -> Iterator[str]:
        """Return the names of the tiers that have requests in the table."""
        return (tier for tier in self._index if self.count(tier))

    def of_tier(self, tier: str) -> Iterator[RequestState]:
        yield from self._index[tier].residents()
        yield from self._index[tier].not_resident.values()

    def interactive(self) -> Iterator[RequestState]:
        return (state for tier in self._tiers if tier.is_interactive for state in self.of_tier(tier.name))

    # -- for a plan --------------------------------------------------------------------------------------------

    def decodes(self, tier: str) -> Iterable[RequestState]:
        """Return the tier's decoding sequences, sorted by their last run, the longest ago first.

        Sequences that last ran in the same step keep their order in that step.
        """
        return self._index[tier].decodes.values()

    def boost(self, priorities: Mapping[str, float]) -> None:
        """Give requests these higher priorities, by id, and end the boost of all other requests."""
        for state in self._boosted:
            state.boosted_to = None
        self._boosted = [self._states[request_id] for request_id in priorities]
        for state in self._boosted:
            state.boosted_to = priorities[state.id]

    def boosted(self, tier: str) -> list[RequestState]:
        """Return the tier's requests that go before others of their tier."""
        return [s for s in self._boosted if s.tier.name == tier and self._states.get(s.id) is s]

    def set_yielding(self, request_ids: Collection[str]) -> list[RequestState]:
        """Let these requests yield, and no others. Return those that yield no longer."""
        ended = [self._states[i] for i in self._yielding if i not in request_ids and i in self._states]
        for state in ended:
            state.yields = False
        self._yielding = frozenset(request_ids)
        for request_id in self._yielding:
            self._states[request_id].yields = True
        return ended

    def num_yielding(self, tier: str) -> int:
        """Return the number of the tier's resident sequences that yield."""
        return sum(state.yields for state in self._index[tier].residents()) if self._yielding else 0

    def prefills(self, tier: str) -> list[RequestState]:
        """Return the tier's resident sequences that still have prefill tokens to compute, sorted by deadline."""
        return sorted(self._index[tier].prefills.values(), key=lambda s: s.edf_key)

    def preempted(self, tier: str) -> Iterable[RequestState]:
        """Return the tier's sequences that the engine knows but that hold no KV blocks on the device, by deadline."""
        index = self._index[tier]
        return (index.not_resident.peekitem(i)[1] for i in range(index.num_preempted))

    def waiting(self, tier: str) -> Iterable[RequestState]:
        """Return the tier's requests that the engine does not know yet, sorted by deadline."""
        index = self._index[tier]
        return (index.not_resident.peekitem(i)[1] for i in range(index.num_preempted, len(index.not_resident)))

    def num_waiting(self, tier: str) -> int:
        index = self._index[tier]
        return len(index.not_resident) - index.num_preempted

    def num_resident(self, tier: str) -> int:
        return self._index[tier].num_resident

    @property
    def any_resident(self) -> bool:
        return any(index.decodes or index.prefills for index in self._index.values())

    def residents(self) -> Iterator[RequestState]:
        for index in self._index.values():
            yield from index.residents()

    def reserved(self) -> Iterator[RequestState]:
        """Return the resident sequences that may have blocks reserved in addition to the blocks that they hold."""
        for index in self._index.values():
            yield from (s for s in index.prefills.values() if s.id not in self._preemption_exhausted)
        yield from self._preemption_exhausted.values()

    def preemption_exhausted(self, tier: str) -> list[RequestState]:
        """Return the tier's resident sequences that have lost their blocks as often as the tier allows."""
        return [state for state in self._preemption_exhausted.values() if state.tier.name == tier]

    def last_run(self, tier: str) -> Iterator[RequestState]:
        """Return the tier's sequences that are in the newest plan and have not ended."""
        for request_id in self._last_run:
            state = self._states.get(request_id)
            if state is not None and state.tier.name == tier:
                yield state

    # -- changes -----------------------------------------------------------------------------------------------

    def update(self, state: RequestState) -> None:
        """Add `state` to the table, or move it to the group to which it belongs now."""
        group = _group_of(state)
        entry = self._entries.get(state.id)
        if entry is not None and entry[0] is group and group is not _Group.NOT_RESIDENT:
            return
        key = (state.status is Status.WAITING, state.edf_key)
        if entry is not None:
            if entry == (group, key):
                return
            self.remove(state)
        self._states[state.id] = state
        self._entries[state.id] = (group, key)
        index = self._index[state.tier.name]
        index.owners[state.request.owner] += 1
        if group is _Group.NOT_RESIDENT:
            index.not_resident[key] = state
            return
        (index.decodes if group is _Group.DECODES else index.prefills)[state.id] = state
        if state.is_preemption_exhausted:
            self._preemption_exhausted[state.id] = state

    def remove(self, state: RequestState) -> None:
        del self._states[state.id]
        group, key = self._entries.pop(state.id)
        index = self._index[state.tier.name]
        index.owners[state.request.owner] -= 1
        if not index.owners[state.request.owner]:
            del index.owners[state.request.owner]
        if group is _Group.NOT_RESIDENT:
            del index.not_resident[key]
        else:
            del (index.decodes if group is _Group.DECODES else index.prefills)[state.id]
            self._preemption_exhausted.pop(state.id, None)

    def note_run(self, request_ids: Sequence[str]) -> None:
        """Record that these sequences are in the newest plan, and put them at the end of the order of decodes."""
        self._last_run = request_ids
        for request_id in request_ids:
            if self._entries[request_id][0] is _Group.DECODES:
                self._decodes_beside(request_id).move_to_end(request_id)

    def note_dropped(self, request_ids: Sequence[str]) -> None:
        """Move the sequences of a dropped step to the front of the order of decodes again, in this order."""
        for request_id in reversed(request_ids):
            entry = self._entries.get(request_id)
            if entry is not None and entry[0] is _Group.DECODES:
                self._decodes_beside(request_id).move_to_end(request_id, last=False)

    def _decodes_beside(self, request_id: str) -> OrderedDict[str, RequestState]:
        """Return all decodes of the request's tier."""
        return self._index[self._states[request_id].tier.name].decodes

    def reconfigure(self, tiers: Mapping[str, Tier]) -> None:
        """Use new tiers. A tier that was removed must have no requests in the table."""
        assert all(name in tiers or not self.count(name) for name in self._index), "a tier with requests cannot go"
        self._tiers = tuple(tiers.values())
        self._index = {name: self._index.get(name) or _TierIndex() for name in tiers}
        for state in self:
            state.tier = tiers[state.tier.name]
        self._preemption_exhausted = {state.id: state for state in self.residents() if state.is_preemption_exhausted}


def _group_of(state: RequestState) -> _Group:
    if not state.is_resident:
        return _Group.NOT_RESIDENT
    return _Group.DECODES if state.is_decode else _Group.PREFILLS
