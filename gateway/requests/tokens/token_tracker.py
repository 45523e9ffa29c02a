"""Follow which tokens of an output the client may see, if the answer reports tokens.

Knows tokens and numbers of characters; does not know text. A token is reported when some of its text is shown. So the
tokens of a stop string, and the token that ends the output, are not reported.
"""

from collections import deque

from engine.interface import TokenLogprobs
from gateway.output.piece import ReportedToken


class TokenTracker:
    """The tokens of one growing output. `offset` is the number of characters before the output.

    With `reports_all`, every token is reported at once, also those whose text is not shown.
    """

    def __init__(self, offset: int = 0, reports_all: bool = False) -> None:
        self._num_decoded = offset
        self._num_shown = offset
        self._reports_all = reports_all
        self._waiting: deque[ReportedToken] = deque()

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token. Its text begins where the text decoded so far ends."""
        self._waiting.append(ReportedToken(token_id, self._num_decoded, logprobs))

    def note(self, num_decoded: int, num_shown: int) -> None:
        """Record that so many more characters were decoded, and so many more are shown."""
        self._num_decoded += num_decoded
        self._num_shown += num_shown

    def pop_reportable(self) -> list[ReportedToken]:
        """Return the tokens that can be reported now, and forget them."""
        waiting, taken = self._waiting, []
        while waiting and (self._reports_all or waiting[0].text_offset < self._num_shown):
            taken.append(waiting.popleft())
        return taken
