"""Find stop strings in text that arrives in pieces.

Knows strings only. A stop string may begin in one piece and end three pieces later, so text that may be the beginning
of one is held back, and no part of a stop string is ever given out. The result does not depend on how the text is cut
into pieces: the match that ends first wins, and the longest of the matches that end at the same character.
"""

from collections.abc import Sequence


class StopMatcher:
    """`matched` is true once a stop string was found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Return the text that can be given out now; after a match, always an empty string."""
        if self.matched:
            return ""
        text = self._held + text
        cut = self._find(text)
        if cut is not None:
            self.matched, self._held = True, ""
            return text[:cut]
        keep = self._begin_of_possible_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the held-back text at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Return where the match that ends first begins, or None if there is no match."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _begin_of_possible_stop(self, text: str) -> int:
        """Return the first index from which the rest of `text` may begin a stop string, or the length of `text`."""
        begin = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < begin and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if 0 <= at < begin:
                begin = at
        return begin
