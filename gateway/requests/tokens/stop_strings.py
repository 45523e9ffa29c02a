"""Find stop strings in text that arrives in pieces.

Knows only strings. A stop string may begin in one piece of text and end three pieces later. Text that may be the
beginning of a stop string is therefore held back, so that no part of a stop string is shown to a client that did not
ask for that.

The result does not depend on how the text is cut into pieces. The match that ends first counts. If several matches end
at the same character, the longest of them counts.
"""

from collections.abc import Sequence


class StopMatcher:
    """A search for stop strings in one growing text.

    `found` is the stop string that was found; an empty string before that. With `is_shown`, the text that is returned
    ends with the stop string, otherwise before it.
    """

    def __init__(self, stops: Sequence[str], is_shown: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_shown = is_shown
        self._held = ""
        self.found = ""

    @property
    def matched(self) -> bool:
        return bool(self.found)

    def feed(self, text: str) -> str:
        """Add a piece of text. Return the text that can now be shown: no part of it can belong to a stop string.

        After a match, always return an empty string.
        """
        if self.matched:
            return ""
        text = self._held + text
        match = self._find(text)
        if match is not None:
            end, begin = match
            self.found, self._held = text[begin:end], ""
            return text[: end if self._is_shown else begin]
        keep = self._begin_of_possible_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the text that is still held back. Call this at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int] | None:
        """Return (end, begin) of the match that ends first; None if there is no match."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found) if found else None

    def _begin_of_possible_stop(self, text: str) -> int:
        """Return the first index at which an incomplete stop string may begin; `len(text)` if there is none."""
        begin = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < begin and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if 0 <= at < begin:
                begin = at
        return begin
