"""The order in which the keys of a bulk tier take turns: start-time fair queueing (Goyal, Vin and Cheng, 1996).

Each request has a virtual start time, from which its score in the tier's queue follows. A request of a key starts where
the key's request before it ends: later by its engine time, divided by the key's weight. But none starts before the
present virtual time, which is the latest start of a request that has begun. So a key that comes later gets its share at
once, whatever the others have put there before, and a key alone gets everything, in order.

Whenever nothing waits, virtual time becomes the deadline that a request has which arrives now. So scores compare with
those of other gateways, and with the deadlines of requests that have no place here. Does no I/O and reads no clock.
"""

from collections import Counter
from dataclasses import dataclass

from scheduler.client.inflight import RecentRatio
from scheduler.request import OWN_REQUESTS, EventKind, Request, TokenEvent


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """The engine time of a token in ms, where many requests run together."""

    prompt_ms: float = 1.0
    output_ms: float = 1.0


@dataclass(slots=True)
class _Place:
    owner: str
    start_ms: float  # virtual, as are all times below
    length_ms: float
    is_early: bool = False  # it has gone before what waited of its key
    has_begun: bool = False


class FairOrder:
    """The places of the open requests of one tier."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}  # by request id
        self._num_open: Counter[str] = Counter()  # by key
        self._num_early: Counter[str] = Counter()  # by key, of those that have gone before what waited of it
        self._now_ms = 0.0  # 0: not known yet
        self._ends_ms: dict[str, float] = {}  # by key, where the place of its newest request ends
        # Output tokens for each request: of each key, and of all.
        self._outputs: dict[str, RecentRatio] = {}
        self._output = RecentRatio()

    def __len__(self) -> int:
        return len(self._places)

    def note_empty(self, due_ms: int) -> None:
        """Note that nothing waits in the tier. `due_ms` is the deadline of a request that arrives now."""
        self._now_ms = due_ms
        self._ends_ms.clear()
        for place in self._places.values():
            place.start_ms, place.has_begun = 0.0, True

    @property
    def now_ms(self) -> int:
        """The present virtual time."""
        return int(self._now_ms)

    def place(self, request: Request, due_ms: int, costs: TokenCosts) -> int:
        """Give a request its place and return its start, in ms. `due_ms` is its deadline by the tier.

        One with an earlier deadline starts at present, before what waits of its key: those that come later wait longer.
        Of a key that shares the tier, the first few do.
        """
        self._now_ms = self._now_ms or due_ms
        end_ms = max(self._now_ms, self._ends_ms.get(request.owner, 0.0))
        is_early = request.deadline_ms < due_ms and self._may_be_early(request.owner)
        start_ms = self._now_ms if is_early else end_ms
        output = self._expected_output(request)
        length_ms = (len(request.prompt_token_ids) * costs.prompt_ms + output * costs.output_ms) / request.weight
        self._places[request.id] = _Place(request.owner, start_ms, length_ms, is_early)
        self._num_open[request.owner] += 1
        self._num_early[request.owner] += is_early
        self._ends_ms[request.owner] = end_ms + length_ms
        return int(start_ms)

    def on_event(self, event: TokenEvent) -> None:
        """Process an event. Those of unknown requests change nothing."""
        place = self._places.get(event.request_id)
        if place is None:
            return
        num_output_tokens = event.index + len(event.token_ids)
        if num_output_tokens:
            place.has_begun = True
            self._now_ms = max(self._now_ms, place.start_ms)
        if event.kind is EventKind.FINISHED:
            self._outputs.setdefault(place.owner, RecentRatio()).add(num_output_tokens, 1)
            self._output.add(num_output_tokens, 1)
        if event.is_last:
            self.remove(event.request_id)

    def remove(self, request_id: str) -> None:
        """Forget a request, if it is known. If it has never run, its key may have the time for another one."""
        place = self._places.pop(request_id, None)
        if place is None:
            return
        self._num_open[place.owner] -= 1
        self._num_early[place.owner] -= place.is_early
        if not self._num_open[place.owner]:
            del self._num_open[place.owner], self._num_early[place.owner]
        if not place.has_begun and place.owner in self._ends_ms:
            self._ends_ms[place.owner] -= place.length_ms

    def _may_be_early(self, owner: str) -> bool:
        """Return whether a request of a key may go before what waits of it."""
        return self._num_early[owner] < OWN_REQUESTS or not self._num_open.keys() - {owner}

    def _expected_output(self, request: Request) -> float:
        """Return how many tokens the request will probably generate: few callers mean their `max_tokens`."""
        mean = self._outputs.get(request.owner, self._output).value
        most = request.sampling.max_tokens
        return most if mean is None else min(most, mean)
