"""Compute, before a step, which tokens a grammar allows its sequence, and which sequences have no token left to choose.

vLLM's workers apply the masks to the logits. What can fail is found here, so that it ends one sequence and not a step.
Knows grammars, stop tokens and bad words; does not know logits.
"""

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from engine.grammar import Bits, CompiledGrammar, Grammars, Matcher, forbid_tokens
from engine.interface import EngineInfo, GrammarError
from engine.sampling.penalties import Penalties
from engine.sequences.sequence import Sequence
from engine.sequences.sequence_table import Chunk

NOTHING_LEFT = "its sampling options leave no token to choose"


class Constraints:
    """The state of each sequence in its grammar, and its forbidden tokens. It lives as long as the sequence object."""

    def __init__(self, info: EngineInfo) -> None:
        self.grammars = Grammars(info)
        self._vocab_size = info.vocab_size
        self._matchers: WeakKeyDictionary[Sequence, Matcher] = WeakKeyDictionary()
        self._penalties: WeakKeyDictionary[Sequence, Penalties] = WeakKeyDictionary()

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
                    matchers[seq_id] = self._updated_matcher(sequence)
                elif self._leaves_nothing(sequence):
                    failed[seq_id] = NOTHING_LEFT
            except GrammarError as error:
                failed[seq_id] = str(error)
        masks = dict(zip(matchers, self.grammars.masks(list(matchers.values())), strict=True)) if matchers else {}
        failed |= {seq_id: reason for seq_id, matcher in matchers.items() if (reason := matcher.failure)}
        for seq_id, mask in masks.items():
            forbid_tokens(mask, self._updated_penalties(sequences[seq_id]).forbidden_ids.tolist())
        return {seq_id: mask for seq_id, mask in masks.items() if seq_id not in failed}, failed

    def _updated_matcher(self, sequence: Sequence) -> Matcher:
        matcher = self._matchers.get(sequence)
        if matcher is None:
            assert isinstance(sequence.compiled_grammar, CompiledGrammar)
            matcher = self._matchers[sequence] = sequence.compiled_grammar.matcher()
        matcher.consume(sequence.token_ids[sequence.num_prompt_tokens + matcher.num_consumed :])
        return matcher

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
