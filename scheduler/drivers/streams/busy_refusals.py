"""Requests that the server has refused because it is busy: whether it has no place for anyone, or never for this one.

A server that refuses a request, and meanwhile serves others that were sent no earlier, has places. Then only this
request waits, each time longer, and is given up in the end. Does not know streams; times are passed in.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.clock import NEVER_S
from scheduler.drivers.streams.in_flight_limit import MAX_PAUSE_S
from scheduler.request_state import RequestState

FIRST_WAIT_S = 2.0  # seconds that a request waits after others were preferred; each wait is twice the one before
MAX_REMEMBERED = 4096  # refused requests; also those that are held no longer, because they may come back


@dataclass(slots=True)
class _Refused:
    begun_s: float  # when the newest stream that was refused was begun
    count: int = 0  # refusals
    overtaken: int = 0  # refusals of these before which others were served


class BusyRefusals:
    """The refusals of each request since its last token."""

    def __init__(self) -> None:
        self._refused: OrderedDict[str, _Refused] = OrderedDict()
        self._served_s: dict[float, float] = {}  # by priority: when the newest stream with tokens was begun
        self._waits: dict[str, tuple[RequestState, float]] = {}  # requests that wait alone, and until when

    def note_served(self, state: RequestState, begun_s: float) -> None:
        """Record that the stream of a request, begun at `begun_s`, has its first tokens."""
        self._refused.pop(_name(state), None)
        self._served_s[state.tier.priority] = max(begun_s, self._served_s.get(state.tier.priority, -NEVER_S))

    def note_refused(self, state: RequestState, begun_s: float) -> bool:
        """Record the refusal of a stream that was begun at `begun_s`.

        Return whether requests of the same or a lower tier were preferred to it since its last refusal.
        """
        refused = self._refused.pop(_name(state), None) or _Refused(NEVER_S)
        served_s = max((s for p, s in self._served_s.items() if p <= state.tier.priority), default=-NEVER_S)
        is_overtaken = served_s >= refused.begun_s
        refused.begun_s, refused.count = begun_s, refused.count + 1
        refused.overtaken += is_overtaken
        self._refused[_name(state)] = refused
        if len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)
        return is_overtaken

    def is_last(self, state: RequestState, now: float) -> bool:
        """Return whether the request is not sent again: overtaken too often, or refused too often and late."""
        refused, attempts = self._refused[_name(state)], state.tier.retry.max_attempts
        return refused.overtaken > attempts or (refused.count > attempts and now > state.deadline_s)

    def wait(self, state: RequestState, retry_after_s: float | None, now: float) -> None:
        """Let a request wait alone that was overtaken."""
        usual_s = FIRST_WAIT_S * 2.0 ** (self._refused[_name(state)].overtaken - 1)
        self._waits[state.id] = (state, now + min(MAX_PAUSE_S, max(usual_s, retry_after_s or 0.0)))

    def forget(self, request_id: str) -> None:
        """End the wait of a request that is held no longer."""
        self._waits.pop(request_id, None)

    def waiting(self, now: float) -> frozenset[str]:
        """Return the ids of the requests that wait alone."""
        self._waits = {i: (state, until_s) for i, (state, until_s) in self._waits.items() if now < until_s}
        return frozenset(self._waits)

    def num_waiting(self, now: float) -> Mapping[str, int]:
        """Return the number of the requests that wait alone, by tier."""
        return Counter(self._waits[i][0].tier.name for i in self.waiting(now))


def _name(state: RequestState) -> str:
    """Return what is the same for all attempts at a line of a batch, which have new ids."""
    return state.request.job_part or state.id
