"""The requests that a worker holds, filed by tier and by what the next plan may do with them.

A plan then looks at as many states as it can use, however many wait or rest. Knows states and orders; decides nothing.
Owner: `SchedulerCore`, which files a state anew whenever its place may have changed; others only read.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain

from sortedcontainers import SortedDict

from scheduler.config import Tier
from scheduler.planning.preemption import is_preemption_exhausted
from scheduler.request import Lease
from scheduler.request_state import RequestState, Status

_NotResidentKey = tuple[bool, tuple[int, int, str]]


class _Place(Enum):
    DECODES = auto()
    PREFILLS = auto()
    NOT_RESIDENT = auto()


@dataclass(slots=True)
class _TierFiles:
    decodes: OrderedDict[str, RequestState] = field(default_factory=OrderedDict)  # who sat out longest first
    prefills: dict[str, RequestState] = field(default_factory=dict)
    not_resident: "SortedDict[_NotResidentKey, RequestState]" = field(default_factory=SortedDict)

    @property
    def num_evicted(self) -> int:
        return int(self.not_resident.bisect_left((True,)))


class RequestTable:
    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._files = {tier.name: _TierFiles() for tier in self._tiers}
        self._states: dict[str, RequestState] = {}
        self._places: dict[str, tuple[_Place, _NotResidentKey]] = {}
        self._preemption_exhausted: dict[str, RequestState] = {}  # residents whose whole length must fit
        self._last_run: Sequence[str] = ()
        self._boosted: frozenset[str] = frozenset()

    # -- what is held ------------------------------------------------------------------------------------------

    @property
    def states(self) -> Mapping[str, RequestState]:
        """By id."""
        return self._states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def count(self, tier: str) -> int:
        files = self._files[tier]
        return len(files.decodes) + len(files.prefills) + len(files.not_resident)

    def tiers_held(self) -> Iterator[str]:
        """Tiers with requests here."""
        return (tier for tier in self._files if self.count(tier))

    def count_status(self, tier: str, *statuses: Status) -> int:
        """Looks at all states of the tier: for upkeep, not for every step."""
        return sum(state.status in statuses for state in self.of_tier(tier))

    def interactive(self) -> Iterator[RequestState]:
        return (state for tier in self._tiers if tier.is_interactive for state in self.of_tier(tier.name))

    def leases(self) -> list[Lease]:
        return [state.lease for state in self]

    # -- for a plan --------------------------------------------------------------------------------------------

    def of_tier(self, tier: str) -> Iterator[RequestState]:
        files = self._files[tier]
        yield from files.decodes.values()
        yield from files.prefills.values()
        yield from files.not_resident.values()

    def decodes(self, tier: str) -> Iterable[RequestState]:
        """Those that press first, then those that sat out longest; equals in the order of their last step."""
        decodes = self._files[tier].decodes.values()
        pressing = [s for s in decodes if s.id in self._boosted] if self._boosted else []
        return chain(pressing, (s for s in decodes if s.id not in self._boosted)) if pressing else decodes

    def boost(self, request_ids: Collection[str], priority: float) -> None:
        """These press from now on, and no others."""
        for request_id in self._boosted:
            if request_id in self._states:
                self._states[request_id].boosted_to = None
        self._boosted = frozenset(request_ids)
        for request_id in self._boosted:
            self._states[request_id].boosted_to = priority

    def prefills(self, tier: str) -> list[RequestState]:
        """Residents with tokens to catch up with, by deadline."""
        return sorted(self._files[tier].prefills.values(), key=lambda s: s.edf_key)

    def evicted(self, tier: str) -> Iterable[RequestState]:
        """Known to the engine without blocks there, by deadline."""
        files = self._files[tier]
        return (files.not_resident.peekitem(i)[1] for i in range(files.num_evicted))

    def waiting(self, tier: str) -> Iterable[RequestState]:
        """Unknown to the engine, by deadline."""
        files = self._files[tier]
        return (files.not_resident.peekitem(i)[1] for i in range(files.num_evicted, len(files.not_resident)))

    def num_waiting(self, tier: str) -> int:
        files = self._files[tier]
        return len(files.not_resident) - files.num_evicted

    def num_resident(self, tier: str) -> int:
        return len(self._files[tier].decodes) + len(self._files[tier].prefills)

    @property
    def any_pending(self) -> bool:
        """Somebody has tokens to catch up with."""
        return any(files.prefills or files.not_resident for files in self._files.values())

    @property
    def any_resident(self) -> bool:
        return any(self.num_resident(tier) for tier in self._files)

    def residents(self) -> Iterator[RequestState]:
        for files in self._files.values():
            yield from files.decodes.values()
            yield from files.prefills.values()

    def promised(self) -> Iterator[RequestState]:
        """Residents to whom blocks may be promised that they do not hold yet."""
        for files in self._files.values():
            yield from (s for s in files.prefills.values() if s.id not in self._preemption_exhausted)
        yield from self._preemption_exhausted.values()

    def last_run(self, tier: str) -> Iterator[RequestState]:
        """Those of the newest plan that have not ended."""
        for request_id in self._last_run:
            state = self._states.get(request_id)
            if state is not None and state.tier.name == tier:
                yield state

    # -- filing ------------------------------------------------------------------------------------------------

    def file(self, state: RequestState) -> None:
        """Put `state` where it now belongs."""
        place = _place_of(state)
        filed = self._places.get(state.id)
        key = (state.status is Status.WAITING, state.edf_key)
        if filed is not None:
            if filed[0] is place and (place is not _Place.NOT_RESIDENT or filed[1] == key):
                return
            self.remove(state)
        self._states[state.id] = state
        self._places[state.id] = (place, key)
        files = self._files[state.tier.name]
        if place is _Place.NOT_RESIDENT:
            files.not_resident[key] = state
            return
        (files.decodes if place is _Place.DECODES else files.prefills)[state.id] = state
        if is_preemption_exhausted(state):
            self._preemption_exhausted[state.id] = state

    def remove(self, state: RequestState) -> None:
        del self._states[state.id]
        place, key = self._places.pop(state.id)
        files = self._files[state.tier.name]
        if place is _Place.NOT_RESIDENT:
            del files.not_resident[key]
        else:
            del (files.decodes if place is _Place.DECODES else files.prefills)[state.id]
            self._preemption_exhausted.pop(state.id, None)

    def note_run(self, request_ids: Sequence[str]) -> None:
        """They are in the newest plan: behind all others from now on."""
        self._last_run = request_ids
        for request_id in request_ids:
            if self._places[request_id][0] is _Place.DECODES:
                self._decodes_beside(request_id).move_to_end(request_id)

    def note_left(self, request_ids: Sequence[str]) -> None:
        """They left the newest step before its end: their turn comes again, in the same order."""
        for request_id in reversed(request_ids):
            filed = self._places.get(request_id)
            if filed is not None and filed[0] is _Place.DECODES:
                self._decodes_beside(request_id).move_to_end(request_id, last=False)

    def _decodes_beside(self, request_id: str) -> OrderedDict[str, RequestState]:
        return self._files[self._states[request_id].tier.name].decodes

    def reconfigure(self, tiers: Mapping[str, Tier]) -> None:
        """Tiers have changed, come or gone; none that is gone may have states."""
        assert all(name in tiers or not self.count(name) for name in self._files), "a tier with states cannot go"
        self._tiers = tuple(tiers.values())
        self._files = {name: self._files.get(name) or _TierFiles() for name in tiers}
        for state in self:
            state.tier = tiers[state.tier.name]
        self._preemption_exhausted = {state.id: state for state in self.residents() if is_preemption_exhausted(state)}


def _place_of(state: RequestState) -> _Place:
    if not state.is_resident:
        return _Place.NOT_RESIDENT
    return _Place.DECODES if state.is_decode else _Place.PREFILLS
