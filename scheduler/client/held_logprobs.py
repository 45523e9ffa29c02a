"""Bounds the log probabilities that the answers of a gateway hold in memory until their clients have them.

Tokens are bounded by the limits of queues and outputs. Log probabilities are not: each token may have 21 of them, and
an answer of 1,024 choices has millions. Knows counts; does not know streams.
"""

from scheduler.request import TokenEvent

MAX_LOGPROBS = 2**22  # of all streams together; about 200 bytes each, as objects and as JSON


class HeldLogprobs:
    """The number of log probabilities that all streams hold, with a limit.

    A stream may hold at most twice as many as are free, so some always stay free.
    """

    def __init__(self, limit: int = MAX_LOGPROBS) -> None:
        self.limit = limit
        self._free = limit

    def has_room(self, held: int, more: int) -> bool:
        """Return whether a stream that holds `held` may take `more`."""
        return held + more <= 2 * (self._free - more)

    def hold(self, count: int) -> None:
        self._free -= count

    def release(self, count: int) -> None:
        self._free += count


def num_logprobs(event: TokenEvent) -> int:
    return sum(1 + len(found.top) for found in (*event.logprobs, *event.prompt_logprobs))
