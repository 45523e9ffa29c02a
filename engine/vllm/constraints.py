"""Compute, before a step, which tokens a grammar allows its sequence, and which sequences have no token left to choose.

vLLM's workers apply the masks to the logits. What can fail is found here, so that it ends one sequence and not the step.
Knows grammars, stop tokens and bad words; does not know logits.
"""

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from engine.interface import EngineInfo
from engine.sampling.penalties import Penalties
from engine.sequences.sequence import Sequence
from engine.sequences.sequence_table import Chunk
from engine.vllm.batch import Bits

NOTHING_LEFT = "its sampling options leave no token to choose"


class Constraints:
    """The state of each sequence in its grammar, and its forbidden tokens. It lives as long as the sequence object."""

    def __init__(self, info: EngineInfo) -> None:
        self._vocab_size = info.vocab_size
        self._penalties: WeakKeyDictionary[Sequence, Penalties] = WeakKeyDictionary()

    def needs_tokens(self, chunk: Chunk) -> bool:
        """Return whether the chunk can only be computed when all tokens of its sequence are known."""
        return _is_constrained(chunk) and min(chunk.sequence.token_ids) < 0

    def masks(self, chunks: Seq[Chunk]) -> tuple[dict[str, Bits], dict[str, str]]:
        """Return the masks of the chunks that sample with a grammar, and the reasons of sequences that fail."""
        sequences = [chunk.sequence for chunk in chunks if _is_constrained(chunk)]
        return {}, {s.seq_id: NOTHING_LEFT for s in sequences if self._leaves_nothing(s)}

    def _leaves_nothing(self, sequence: Sequence) -> bool:
        penalties = self._updated_penalties(sequence)
        return len(penalties.allowed_ids) > 0 and set(penalties.allowed_ids) <= set(penalties.forbidden_ids)

    def _updated_penalties(self, sequence: Sequence) -> Penalties:
        penalties = self._penalties.get(sequence)
        if penalties is None:
            penalties = self._penalties[sequence] = Penalties(sequence, self._vocab_size)
        penalties.update(sequence)
        return penalties


def _is_constrained(chunk: Chunk) -> bool:
    params = chunk.sequence.sampling
    forbids = bool(params.bad_words or params.min_tokens)
    return chunk.samples and (params.grammar is not None or (forbids and bool(params.allowed_token_ids)))
