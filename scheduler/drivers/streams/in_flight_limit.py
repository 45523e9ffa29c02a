"""The number of requests that a server may have at once, learned from its answers.

A request beyond what the server runs waits in the server's own queue, where no policy of ours can reorder it. So the
limit falls when the server refuses requests or lets them wait, and rises slowly while it is in use and nothing waits.
Knows numbers and times that are passed in; does no I/O.
"""

from engine.streaming import UpstreamLoad
from scheduler.clock import NEVER_S

# Places of the server that bulk leaves free while there is interactive traffic, or if the server would have to compute
# all of a stream again that is hung up. But at most each fourth one.
INTERACTIVE_PLACES = 2
CUT = 0.8  # factor by which the limit falls when the server refuses a request
GROWTH_PER_S = 1.0  # requests by which the limit rises per second
# The limit of the slow start doubles after so many decode-only steps of more than half as many streams. If a server
# shows no steps, because its tokens come several at a time, it doubles after so many seconds.
DOUBLING_STEPS = 16
DOUBLING_S = 5.0
MAX_PAUSE_S = 30.0  # the longest pause after a refusal, whatever the server asks for
USUAL_PAUSE_S = 0.5  # the pause if the server asks for none


def free_places(max_in_flight: float) -> float:
    """Return how many of the places bulk leaves free."""
    return min(INTERACTIVE_PLACES, max_in_flight // 4)


class InFlightLimit:
    """The largest number of requests in flight. `allowed` bounds it (None: unbounded), as do the server's places."""

    def __init__(self, allowed: int | None = None) -> None:
        self._allowed = float(allowed) if allowed else NEVER_S
        self._num_places: int | None = None  # of the server, as it last said
        self._largest = self._allowed
        self._value = self._largest
        self._paused_until_s = -NEVER_S
        self._grown_s = -NEVER_S

    @property
    def value(self) -> float:
        return self._value

    def is_paused(self, now: float) -> bool:
        """Whether the server has refused a request, and said or implied that it will refuse others."""
        return now < self._paused_until_s

    def note_busy(self, num_in_flight: int, retry_after_s: float | None, now: float) -> None:
        """Record that the server refused one of `num_in_flight` requests."""
        if not self.is_paused(now):  # several refusals at once are one sign
            self._value = max(1.0, CUT * min(self._value, num_in_flight))
        pause_s = USUAL_PAUSE_S if retry_after_s is None else min(retry_after_s, MAX_PAUSE_S)
        self._paused_until_s = max(self._paused_until_s, now + pause_s)
        self._grown_s = now

    def pause(self, now: float) -> None:
        """Send nothing for a moment, because a stream broke off: the server may be about to end."""
        self._paused_until_s = max(self._paused_until_s, now + USUAL_PAUSE_S)

    def note_load(self, load: UpstreamLoad, num_in_flight: int, num_stuck: int, now: float) -> None:
        """Record what the server says of its load and its places.

        Of the requests in flight, `num_stuck` were sent some steps ago and have no token: what was sent in the last
        moment waits for the next step, and not for a place.
        """
        if load.num_places not in (None, self._num_places):  # its first answer, or it was started anew
            self._num_places = load.num_places
            self._value = self._largest = min(self._allowed, load.num_places or NEVER_S)
        if num_waiting := min(load.num_waiting or 0, num_stuck):
            self._value = max(1.0, min(self._value, num_in_flight) - num_waiting)
            self._grown_s = now

    def grow(self, num_in_use: float, now: float) -> None:
        """Raise the limit if it is in use. Call this about twice a second.

        The requests in flight are in use, and the places that bulk leaves free while it is alone. Beside interactive
        traffic, only those in flight are: bulk that tried how many places there are would be in its way.
        """
        if self._value < self._largest and num_in_use >= self._value - 1 and self._grown_s > -NEVER_S:
            self._value = min(self._largest, self._value + GROWTH_PER_S * (now - self._grown_s))
        self._grown_s = now


class SlowStart:
    """The number of streams up to which bulk may start more. It doubles while it is in use.

    If bulk took all places of a server at once, steps of a few streams would never be seen, and nothing would tell how
    much longer each further stream makes a step.
    """

    def __init__(self) -> None:
        self.value = 2
        self._num_steps = 0
        self._in_use_s: float | None = None  # since when the limit is in use

    def note_step(self, num_decodes: int) -> None:
        """Record a step of the server that only decoded."""
        self._num_steps += num_decodes > self.value // 2
        if self._num_steps >= DOUBLING_STEPS:
            self._double()

    def review(self, num_in_flight: int, now: float) -> None:
        """Raise the limit if it has been in use for long. Call this about twice a second."""
        if num_in_flight < self.value:
            self._in_use_s = None
        elif self._in_use_s is None:
            self._in_use_s = now
        elif now - self._in_use_s >= DOUBLING_S:
            self._double()

    def _double(self) -> None:
        self.value *= 2
        self._num_steps, self._in_use_s = 0, None
