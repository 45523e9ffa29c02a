"""What the engine's prefix cache is likely to hold of bulk prompts, as far as the plans tell.

Bulk requests often begin alike: with instructions, examples, a document. The engine finds such a beginning in its
prefix cache, but only once it is computed. So of requests that begin alike, one goes first, and the others start when
it has computed what they share. And a request that will find most of its prompt in the cache takes only the rest from
the step's budget, so that many of them start in one step.

All of this is a hint: if the cache lacks a block after all, the engine computes as many tokens as the plan says, and
the rest follows in a later step. Knows prompts and plans; does not know the engine.
"""

from collections import OrderedDict
from collections.abc import Container

from engine.interface import EngineInfo
from scheduler.request import prefix_digests
from scheduler.request_state import RequestState


class PromptPrefixes:
    """The newest computed blocks of bulk prompts. The digest of a block also covers all blocks before it."""

    def __init__(self, engine: EngineInfo) -> None:
        self._block_size = engine.block_size
        self._capacity = engine.num_blocks if engine.caches_prefixes else 0
        self._computed: OrderedDict[int, None] = OrderedDict()  # the block whose use is the longest ago comes first

    def lookup(self, state: RequestState, in_step: Container[int]) -> tuple[int, bool]:
        """Return how many tokens the cache is likely to hold of the beginning of a request without KV.

        Also return whether one of the blocks `in_step`, which the planned step computes, continues this beginning.
        """
        if not self._capacity or state.num_computed_tokens or state.request.sampling.prompt_logprobs is not None:
            return 0, False
        digests = self._digests(state)
        missing = next((i for i, digest in enumerate(digests) if digest not in self._computed), len(digests))
        return missing * self._block_size, missing < len(digests) and digests[missing] in in_step

    def after(self, state: RequestState, num_tokens: int) -> tuple[int, ...]:
        """Return the digests of the prompt's blocks that are computed after the request has run `num_tokens` more."""
        if not self._capacity:
            return ()
        begin = state.num_computed_tokens or self.lookup(state, ())[0]
        return self._digests(state)[: (begin + num_tokens) // self._block_size]

    def note(self, state: RequestState, num_tokens: int) -> None:
        """Record that the next step runs `num_tokens` tokens of the request's prompt."""
        for digest in self.after(state, num_tokens):
            self._computed[digest] = None
            self._computed.move_to_end(digest)
        while len(self._computed) > self._capacity:
            self._computed.popitem(last=False)

    def _digests(self, state: RequestState) -> tuple[int, ...]:
        if state.prompt_digests is None:
            state.prompt_digests = prefix_digests(state.request, self._block_size)
        return state.prompt_digests
