"""Stop strings in text that arrives in pieces.

Pure: knows strings only. A stop string may begin in one piece and end three pieces later; what could still
become one is held back, and nothing of a stop string is ever given out. How the text is cut into pieces never
changes the result: the match that *ends* first wins, the longest of those that end together.
"""

from collections.abc import Sequence


class StopMatcher:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """What may be shown now. After a match, nothing more comes."""
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
        """The output has ended: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Where the earliest-ending match begins."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _begin_of_possible_stop(self, text: str) -> int:
        """The first index from which `text` is the beginning of a stop string; its length if there is none."""
        begin = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < begin and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if 0 <= at < begin:
                begin = at
        return begin
