"""What a sequence's tokens so far mean for its next one: its penalties, and its place in its grammar.

This state depends only on the sequence's parameters and tokens, so a preempted or restarted sequence gets the same
tokens. It is kept as long as the sequence object exists.
"""

from weakref import WeakKeyDictionary

from engine.grammar import CompiledGrammar, Matcher
from engine.interface import SamplingParams
from engine.sampling.penalties import Penalties
from engine.sequences.sequence import Sequence

# Reasons for which a sequence fails.
BROKEN_LOGITS = "the model's logits are not finite"
NOTHING_LEFT = "its sampling options leave no token to choose"


def _limit(sampling: SamplingParams) -> int | None:
    """Return within how many tokens an output should end; None if its options may forbid the way to its end."""
    may_forbid = sampling.ignore_eos or sampling.allowed_token_ids or sampling.bad_words
    return None if may_forbid else sampling.max_tokens


class SequenceStates:
    """The penalties and the matchers of sequences. What is returned knows all tokens of the sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._penalties: WeakKeyDictionary[Sequence, Penalties] = WeakKeyDictionary()
        self._matchers: WeakKeyDictionary[Sequence, Matcher] = WeakKeyDictionary()

    def penalties(self, sequence: Sequence) -> Penalties:
        penalties = self._penalties.get(sequence)
        if penalties is None:
            penalties = self._penalties[sequence] = Penalties(sequence, self._vocab_size)
        penalties.update(sequence)
        return penalties

    def matcher(self, sequence: Sequence) -> Matcher:
        """Return the matcher of a sequence with a grammar. Raises `GrammarError` if the grammar fails."""
        matcher = self._matchers.get(sequence)
        if matcher is None:
            assert isinstance(sequence.compiled_grammar, CompiledGrammar)
            matcher = self._matchers[sequence] = sequence.compiled_grammar.matcher(_limit(sequence.sampling))
        matcher.consume(sequence.token_ids[sequence.num_prompt_tokens + matcher.num_consumed :])
        return matcher
