"""What becomes of a request whose stream ends before its answer is whole: sent again, sent back to the queue, given up.

Tells the limit and the server's state what the end says of the server. Does
no I/O; the time is passed in.
"""

from collections.abc import Callable, Iterable

from engine.streaming import UpstreamBusy, UpstreamLost, UpstreamUnreachable, UpstreamUnusable
from scheduler.drivers.streams.busy_refusals import BusyRefusals
from scheduler.drivers.streams.in_flight_limit import InFlightLimit
from scheduler.drivers.streams.server_state import ServerState
from scheduler.drivers.streams.streams import StreamTable
from scheduler.request_state import RequestState

CANNOT_GO_ON = "The answer cannot be continued from where it ended."
ALWAYS_REFUSED = "The request was given up, because it was refused again and again."


class Retries:
    def __init__(
        self,
        streams: StreamTable,
        server: ServerState,
        limit: InFlightLimit,
        give_up: Callable[[RequestState, str], None],
    ) -> None:
        """`give_up` ends a request at which there is no further attempt; its second argument is the reason."""
        self._streams = streams
        self._server = server
        self._limit = limit
        self._give_up = give_up
        self.busy = BusyRefusals()
        # Requests that the server has answered as if it served nobody, with the reasons; not counted yet.
        self._turned_away: list[tuple[RequestState, str]] = []

    # -- what streams bring ------------------------------------------------------------------------------------

    def refuse(self, state: RequestState, error: UpstreamBusy, now: float) -> bool:
        """Handle a request for which the server has no place. Return whether it goes back to the queue."""
        is_overtaken = self.busy.note_refused(state, self._streams[state.id].begun_s)
        if not is_overtaken:
            self._limit.note_busy(len(self._streams), error.retry_after_s, now)
        self._streams.interrupt(state, now)
        if self.busy.is_last(state, now):
            self._give_up(state, f"{error} {ALWAYS_REFUSED}")
            return False
        if is_overtaken:
            self.busy.wait(state, error.retry_after_s, now)
            return False
        return not state.output_token_ids

    def lose(self, state: RequestState, error: UpstreamLost, now: float) -> None:
        """Handle a stream that broke off."""
        if isinstance(error, UpstreamUnreachable):
            self._server.note_unreachable(error, now, is_certain=True)
            self._rewind(state, str(error), now)
        else:
            self._limit.pause(now)
            self._server.must_be_asked = True
            self.retry(state, str(error), now)
        if isinstance(error, UpstreamUnusable):
            self._turned_away.append((state, str(error)))

    def retry(self, state: RequestState, reason: str, now: float) -> None:
        """Prepare another attempt at a request whose stream has ended. After the last one, it is given up."""
        self._rewind(state, reason, now)
        self._count(state, reason)

    def _rewind(self, state: RequestState, reason: str, now: float) -> None:
        cannot_go_on = self._streams.cannot_go_on(state)
        self._streams.rewind(state, now)
        if cannot_go_on:
            self._give_up(state, f"{reason} {CANNOT_GO_ON}")

    def _count(self, state: RequestState, reason: str) -> None:
        """Count an attempt that failed for `reason`. After the last one, the request is given up."""
        state.num_lost_streams += 1
        attempts = state.tier.retry.max_attempts
        if state.attempt + state.num_lost_streams > attempts:
            self._give_up(state, f"{reason} The request was given up after {attempts} attempts.")

    # -- what is known of the server ---------------------------------------------------------------------------

    def settle(self, *, is_counted: bool) -> None:
        """Count the attempts that were turned away, or forget about them.

        If the server serves others again before it counts as down, the fault was in these requests.
        """
        turned_away, self._turned_away = self._turned_away, []
        for state, reason in turned_away:
            if is_counted:
                self._count(state, reason)

    def end_unfinishable(self, states: Iterable[RequestState], reason: str) -> list[RequestState]:
        """Give up the requests of which the client has tokens that would not fit those of a new stream. Return them."""
        ending = [state for state in states if self._streams.cannot_go_on(state)]
        for state in ending:
            self._give_up(state, f"{reason} {CANNOT_GO_ON}")
        return ending
