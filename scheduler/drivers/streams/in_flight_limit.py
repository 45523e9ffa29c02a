"""The number of requests that a server may have at once, learned from its answers.

A request beyond what the server runs waits in the server's own queue, where no policy of ours can reorder it. So the
limit falls when the server refuses requests or lets them wait, and rises slowly while it is in use and nothing waits.
Knows numbers and times that are passed in; does no I/O.
"""

from engine.streaming import UpstreamLoad
from scheduler.clock import NEVER_S

CUT = 0.8  # factor by which the limit falls when the server refuses a request
GROWTH_PER_S = 1.0  # requests by which the limit rises per second
MAX_PAUSE_S = 30.0  # the longest pause after a refusal, whatever the server asks for
USUAL_PAUSE_S = 0.5  # the pause if the server asks for none


class InFlightLimit:
    """The largest number of requests in flight. `largest` bounds it (None: unbounded)."""

    def __init__(self, largest: int | None = None) -> None:
        self._largest = float(largest) if largest else NEVER_S
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
        """Record what the server says of its load.

        Of the requests in flight, `num_stuck` were sent some steps ago and have no token: what was sent in the last
        moment waits for the next step, and not for a place.
        """
        if num_waiting := min(load.num_waiting or 0, num_stuck):
            self._value = max(1.0, min(self._value, num_in_flight) - num_waiting)
            self._grown_s = now

    def grow(self, num_in_flight: int, now: float) -> None:
        """Raise the limit if it is in use. Call this about twice a second."""
        if self._value < self._largest and num_in_flight >= self._value - 1 and self._grown_s > -NEVER_S:
            self._value = min(self._largest, self._value + GROWTH_PER_S * (now - self._grown_s))
        self._grown_s = now
