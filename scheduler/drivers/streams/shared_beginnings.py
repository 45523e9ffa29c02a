"""What the server's prefix cache is likely to hold of a prompt, because other requests have brought its beginning.

Servers say only at the end of an answer how many tokens they found. What a prompt costs is learned from its first
token, and a prompt of which most is cached need not be sent in parts.
"""

from dataclasses import replace

from engine.streaming import Upstream
from scheduler.drivers.streams.recompute import TokenBucket
from scheduler.planning.prompt_prefixes import PromptPrefixes
from scheduler.request_state import RequestState

MAX_BLOCKS = 65_536  # KV blocks that are remembered, as a large server has; they take about 10 MB


class SharedBeginnings:
    """The newest beginnings of prompts that were computed. It finds none while too many were not found again."""

    def __init__(self, upstream: Upstream, misses: TokenBucket) -> None:
        """`misses` is the budget of the tokens that the server had to compute although they should be cached."""
        self._upstream = upstream
        self._misses = misses
        num_blocks = min(upstream.info.num_blocks, MAX_BLOCKS)
        self._prefixes = PromptPrefixes(replace(upstream.info, caches_prefixes=True, num_blocks=num_blocks))

    def find(self, state: RequestState) -> int:
        """Return how many tokens of a request's prompt are likely to be cached."""
        return self._prefixes.lookup(state, ())[0] if self._misses.level >= 0 and self._is_known(state) else 0

    def note_computed(self, state: RequestState, num_tokens: int) -> None:
        """Record that the server has computed the first `num_tokens` tokens of a request, or found them."""
        if self._is_known(state):
            num_found, _ = self._prefixes.lookup(state, ())
            self._prefixes.note(state, max(0, num_tokens - num_found))

    def note_missed(self, num_tokens: int) -> None:
        """Record that the server did not find so many tokens that should have been cached."""
        self._misses.spend(max(0, num_tokens))

    def _is_known(self, state: RequestState) -> bool:
        """Return whether it is known what the server gets, and whether it caches it."""
        return not state.request.chat and self._upstream.keeps_prefixes(state.request.cache_salt)
