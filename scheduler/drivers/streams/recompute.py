"""The tokens that the server may compute a second time, and those that it has: for hang-ups, and for parts of answers.

A stream that was hung up, or that brought a part of an answer, is continued from what the server's prefix cache has.
Each of the two has a budget. That of parts is refilled by all computed tokens, and that of hang-ups by the time in
which the server is busy: a prompt's token takes much less time than one of an answer. Does not know streams.
"""

from collections import Counter

from engine.step_time.kind import SHORTEST_S

RECOMPUTE_SHARE = 0.05  # share of all computed tokens, or of the server's time, that may be computed a second time
MAX_TOKENS = 8192.0  # size of a budget, which bounds the hang-ups at one time


class TokenBucket:
    """The work that may be thrown away now, in seconds or tokens, so that it stays below a share of all work.

    The work that is done refills the bucket. It starts empty, unless a `level` is given.
    """

    def __init__(self, size: float, share: float, level: float = 0.0) -> None:
        self._size = size
        self._share = share
        self.level = level

    def refill(self, work: float) -> None:
        """Raise the level by the bucket's share of `work`."""
        self.level = min(self._size, self.level + self._share * work)

    def spend(self, wasted: float) -> None:
        """Lower the level. What was spent in error comes back as a negative number."""
        self.level = min(self._size, self.level - wasted)


class Recompute:
    """The budgets, and the tokens that were computed again."""

    def __init__(self) -> None:
        self.hang_ups = TokenBucket(MAX_TOKENS, RECOMPUTE_SHARE)
        # A server may keep less than in the trial: llama.cpp keeps only prompts of a model with sliding windows.
        self.parts = TokenBucket(MAX_TOKENS, RECOMPUTE_SHARE)
        self.misses = TokenBucket(MAX_TOKENS, RECOMPUTE_SHARE)  # of other requests' beginnings; no cost of ours
        self.num_computed = 0  # tokens that the server has computed
        self.tokens: Counter[str] = Counter()  # that were computed again, by tier
        self._noted_s = 0.0  # until when the server's time has been counted

    def note_computed(self, num_tokens: int) -> None:
        self.num_computed += num_tokens
        self.parts.refill(num_tokens)
        self.misses.refill(num_tokens)

    def note_time(self, token_s: float, now: float, *, is_busy: bool) -> None:
        """Record whether the server has been busy since the last call; a prompt's token takes `token_s` seconds."""
        if is_busy:
            self.hang_ups.refill((now - self._noted_s) / max(token_s, SHORTEST_S))
        self._noted_s = now

    def note_hang_up(self, tier: str, num_lost: int) -> None:
        """Record that a stream is hung up, for which `num_lost` tokens must be computed again."""
        self.hang_ups.spend(num_lost)
        self.tokens[tier] += num_lost

    def note_lost(self, tier: str, num_lost: int, *, is_part: bool) -> None:
        """Record that `num_lost` tokens more than expected were computed again. For parts, none are expected."""
        if is_part:
            self.parts.spend(max(0, num_lost))
        else:
            self.hang_ups.spend(num_lost)
        self.tokens[tier] += max(0, num_lost)
