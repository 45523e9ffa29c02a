"""The attempts at the requests that a worker holds for a server: how many there were, and which requests are given up.

Does not know streams. The time does not matter here.
"""

from scheduler.request_state import RequestState


class Attempts:
    """The claims and the lost streams of each held request."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._turned_away: list[tuple[RequestState, str]] = []  # with the reason; not counted yet
        self._given_up: list[tuple[RequestState, str]] = []

    def begin(self, state: RequestState) -> None:
        self._counts[state.id] = state.attempt

    def forget(self, request_id: str) -> None:
        """End the count of a request that is held no longer."""
        self._counts.pop(request_id, None)

    def count(self, state: RequestState, reason: str) -> None:
        """Count an attempt that failed for `reason`. After the last one, the request is given up."""
        self._counts[state.id] += 1
        attempts = state.tier.retry.max_attempts
        if self._counts[state.id] > attempts:
            self.give_up(state, f"{reason} The request was given up after {attempts} attempts.")

    def give_up(self, state: RequestState, reason: str) -> None:
        """Record that there is no further attempt at a request."""
        self._given_up.append((state, reason))

    def turn_away(self, state: RequestState, reason: str) -> None:
        """Record that the server answered as if it served nobody. `settle` says whether the request is at fault."""
        self._turned_away.append((state, reason))

    def settle(self, *, is_counted: bool) -> None:
        """Count the attempts that were turned away, or forget about them."""
        turned_away, self._turned_away = self._turned_away, []
        for state, reason in turned_away:
            if is_counted and state.id in self._counts:
                self.count(state, reason)

    def pop_given_up(self) -> list[tuple[RequestState, str]]:
        """Return the requests that are given up, each with its reason, and forget them."""
        given_up, self._given_up = self._given_up, []
        return given_up
