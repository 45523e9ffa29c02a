"""The states that have not ended, filed by tier and by what the next plan may do with them.

A plan then looks at as many states as it can use, however many wait or rest. Knows states and orders; decides nothing.
Owner: `SchedulerCore`, which files a state anew whenever its place may have changed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from sortedcontainers import SortedDict

from scheduler.config import Tier
from scheduler.preemption import is_worn
from scheduler.states import RequestState, Status

_AbsentKey = tuple[bool, tuple[int, int, str]]


class _Place(Enum):
    DECODES = auto()
    PREFILLS = auto()
    ABSENT = auto()


@dataclass(slots=True)
class _TierFiles:
    decodes: OrderedDict[str, RequestState] = field(default_factory=OrderedDict)  # who sat out longest first
    prefills: dict[str, RequestState] = field(default_factory=dict)
    absent: "SortedDict[_AbsentKey, RequestState]" = field(default_factory=SortedDict)

    @property
    def num_evicted(self) -> int:
        return int(self.absent.bisect_left((True,)))


class Roster:
    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._files = {tier.name: _TierFiles() for tier in tiers}
        self._places: dict[str, tuple[_Place, RequestState, _AbsentKey]] = {}
        self._worn: dict[str, RequestState] = {}  # residents whose whole length must fit
        self._last_run: Sequence[str] = ()

    @classmethod
    def of(cls, tiers: Iterable[Tier], states: Iterable[RequestState]) -> "Roster":
        """In the order in which such states would have come to be."""
        roster = cls(tiers)
        for state in sorted(states, key=lambda s: (s.last_step, s.edf_key)):
            roster.file(state)
        newest = max((s.last_step for s in roster), default=-1)
        roster._last_run = [s.id for s in roster if s.last_step == newest]
        return roster

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[RequestState]:
        return (state for _, state, _ in self._places.values())

    def count(self, tier: str) -> int:
        files = self._files[tier]
        return len(files.decodes) + len(files.prefills) + len(files.absent)

    # -- for a plan --------------------------------------------------------------------------------------------

    def of_tier(self, tier: str) -> Iterator[RequestState]:
        files = self._files[tier]
        yield from files.decodes.values()
        yield from files.prefills.values()
        yield from files.absent.values()

    def decodes(self, tier: str) -> Iterable[RequestState]:
        """Those that sat out longest first; equals in the order of their last step."""
        return self._files[tier].decodes.values()

    def prefills(self, tier: str) -> list[RequestState]:
        """Residents with tokens to catch up with, by deadline."""
        return sorted(self._files[tier].prefills.values(), key=lambda s: s.edf_key)

    def evicted(self, tier: str) -> Iterable[RequestState]:
        """Known to the engine without blocks there, by deadline."""
        files = self._files[tier]
        return (files.absent.peekitem(i)[1] for i in range(files.num_evicted))

    def waiting(self, tier: str) -> Iterable[RequestState]:
        """Unknown to the engine, by deadline."""
        files = self._files[tier]
        return (files.absent.peekitem(i)[1] for i in range(files.num_evicted, len(files.absent)))

    def num_waiting(self, tier: str) -> int:
        files = self._files[tier]
        return len(files.absent) - files.num_evicted

    def num_resident(self, tier: str) -> int:
        return len(self._files[tier].decodes) + len(self._files[tier].prefills)

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
            yield from (s for s in files.prefills.values() if s.id not in self._worn)
        yield from self._worn.values()

    def last_run(self, tier: str) -> Iterator[RequestState]:
        """Those of the newest plan that have not ended."""
        for request_id in self._last_run:
            if request_id in self._places:
                state = self._places[request_id][1]
                if state.tier.name == tier:
                    yield state

    # -- filing ------------------------------------------------------------------------------------------------

    def file(self, state: RequestState) -> None:
        """Put `state` where it now belongs."""
        place = _place_of(state)
        filed = self._places.get(state.id)
        key = (state.status is Status.WAITING, state.edf_key)
        if filed is not None:
            if filed[0] is place and (place is not _Place.ABSENT or filed[2] == key):
                return
            self.remove(state)
        self._places[state.id] = (place, state, key)
        files = self._files[state.tier.name]
        if place is _Place.ABSENT:
            files.absent[key] = state
            return
        (files.decodes if place is _Place.DECODES else files.prefills)[state.id] = state
        if is_worn(state):
            self._worn[state.id] = state

    def remove(self, state: RequestState) -> None:
        place, _, key = self._places.pop(state.id)
        files = self._files[state.tier.name]
        if place is _Place.ABSENT:
            del files.absent[key]
        else:
            del (files.decodes if place is _Place.DECODES else files.prefills)[state.id]
            self._worn.pop(state.id, None)

    def note_run(self, request_ids: Sequence[str]) -> None:
        """They are in the newest plan: behind all others from now on."""
        self._last_run = request_ids
        for request_id in request_ids:
            place, state, _ = self._places[request_id]
            if place is _Place.DECODES:
                self._files[state.tier.name].decodes.move_to_end(request_id)


def _place_of(state: RequestState) -> _Place:
    if not state.is_resident:
        return _Place.ABSENT
    return _Place.DECODES if state.is_decode else _Place.PREFILLS
