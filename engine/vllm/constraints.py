"""Compute, before a step, which tokens a grammar allows its sequence, and which sequences have no token left to choose.

vLLM's workers apply the masks to the logits. What can fail is found here, so that it ends one sequence and not a step.
Knows grammars, stop tokens and bad words; does not know logits.
"""

from collections.abc import Sequence as Seq

from engine.grammar import Bits, Grammars, Matcher, forbid_tokens
from engine.interface import EngineInfo, GrammarError
from engine.sampling.sequence_state import NOTHING_LEFT, SequenceStates
from engine.sequences.chunk import Chunk
from engine.sequences.sequence import Sequence


class Constraints:
    """The masks of grammars, and the sequences that their sampling options leave nothing."""

    def __init__(self, info: EngineInfo) -> None:
        self.grammars = Grammars(info)
        self._states = SequenceStates(info.vocab_size)

    def needs_tokens(self, chunk: Chunk) -> bool:
        """Return whether the chunk can only be computed when all tokens of its sequence are known."""
        return _is_constrained(chunk) and chunk.sequence.token_ids[-1] < 0

    def masks(self, chunks: Seq[Chunk]) -> tuple[dict[str, Bits], dict[str, str]]:
        """Return the masks of the chunks that sample with a grammar, and the reasons of the sequences that fail."""
        matchers: dict[str, Matcher] = {}
        failed: dict[str, str] = {}
        sequences = {chunk.sequence.seq_id: chunk.sequence for chunk in chunks if _is_constrained(chunk)}
        for seq_id, sequence in sequences.items():
            try:
                if sequence.sampling.grammar is not None:
                    matchers[seq_id] = self._states.matcher(sequence)
                elif self._leaves_nothing(sequence):
                    failed[seq_id] = NOTHING_LEFT
            except GrammarError as error:
                failed[seq_id] = str(error)
        masks = dict(zip(matchers, self.grammars.masks(list(matchers.values())), strict=True)) if matchers else {}
        failed |= {seq_id: reason for seq_id, matcher in matchers.items() if (reason := matcher.failure)}
        for seq_id, mask in masks.items():
            forbid_tokens(mask, self._states.penalties(sequences[seq_id]).forbidden_ids.tolist())
        return {seq_id: mask for seq_id, mask in masks.items() if seq_id not in failed}, failed

    def _leaves_nothing(self, sequence: Sequence) -> bool:
        penalties = self._states.penalties(sequence)
        return len(penalties.allowed_ids) > 0 and set(penalties.allowed_ids) <= set(penalties.forbidden_ids)


def _is_constrained(chunk: Chunk) -> bool:
    params = chunk.sequence.sampling
    forbids = bool(params.bad_words or params.min_tokens)
    return chunk.samples and (params.grammar is not None or (forbids and bool(params.allowed_token_ids)))
