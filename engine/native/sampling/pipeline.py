"""The next token of every sequence of a step, by all that its sampling parameters ask for.

Knows the order in which they take effect, and remembers between steps what they need of a sequence's past; not
models, chunks or blocks. In this order, each row for itself:

    log probabilities ← the model's logits
    bias → repetition, presence and frequency penalty → min_tokens → grammar → temperature → top_k → top_p → min_p

which is transformers' order. Rows without such options are sampled as they are, and pay nothing for the others.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.interface import EngineInfo, SamplingParams
from engine.native.sampling.grammar import GrammarError, Grammars, Matcher, apply_masks, hold_back
from engine.native.sampling.logprobs import token_logprobs
from engine.native.sampling.outcome import Outcome
from engine.native.sampling.penalties import LogitRules, add_bias, hold_back_stops, penalise
from engine.native.sampling.sampler import Sampler, SamplingRow, sample
from engine.sequences.sequence import Sequence

BROKEN_LOGITS = "the model's logits are not finite"
_BROKEN = Outcome(failure=BROKEN_LOGITS)
_NOTHING_LEFT = Outcome(failure="its sampling options leave no token to choose")
_GREEDY = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0)


class TokenChooser:
    """What it remembers follows from a sequence's tokens alone and goes with the sequence: preempted or not, here or
    begun again elsewhere, the tokens are the same."""

    def __init__(self, info: EngineInfo, sampler: Sampler = sample) -> None:
        self._sample = sampler
        self._vocab_size = info.vocab_size
        self._grammars = Grammars(info)
        self._rules: WeakKeyDictionary[Sequence, LogitRules] = WeakKeyDictionary()
        self._matchers: WeakKeyDictionary[Sequence, Matcher] = WeakKeyDictionary()

    def choose(self, logits: Tensor, sequences: Seq[Sequence]) -> list[Outcome]:
        """For (sequences, vocab) logits. What cannot be done for one sequence is its `failure`."""
        # Of rows that alter them only whether the model's logits are sound: a mask could hide that they are not.
        rows = [_GREEDY if s.alters_logits else SamplingRow(s.sampling, s.num_output_tokens) for s in sequences]
        outcomes = [_outcome(token_id, _BROKEN) for token_id in self._sample(logits, rows)]
        altered = [i for i, s in enumerate(sequences) if s.alters_logits and outcomes[i].failure is None]
        if altered:
            # A copy: the model's logits stay as they are.
            own = logits[torch.tensor(altered, device=logits.device)].float()
            for i, outcome in zip(altered, self._choose_altered(own, [sequences[i] for i in altered]), strict=True):
                outcomes[i] = outcome
        _report_logprobs(logits, sequences, outcomes)
        return outcomes

    def _choose_altered(self, own: Tensor, sequences: list[Sequence]) -> list[Outcome]:
        """From the sequences' own logits, (sequences, vocab) in float32, which are altered in place."""
        rules = [self._followed_rules(sequence) for sequence in sequences]
        add_bias(own, rules)
        penalise(own, rules)
        hold_back_stops(own, rules)
        failures = self._mask_by_grammar(own, sequences, rules)
        token_ids = self._sample(own, [SamplingRow(s.sampling, s.num_output_tokens) for s in sequences])
        return [failures.get(i) or _outcome(token_id, _NOTHING_LEFT) for i, token_id in enumerate(token_ids)]

    def _followed_rules(self, sequence: Sequence) -> LogitRules:
        rules = self._rules.get(sequence)
        if rules is None:
            rules = self._rules[sequence] = LogitRules(sequence, self._vocab_size)
        rules.follow(sequence)
        return rules

    def _mask_by_grammar(
        self, logits: Tensor, sequences: list[Sequence], rules: list[LogitRules]
    ) -> dict[int, Outcome]:
        """In place; what came of the rows whose grammar broke."""
        failures: dict[int, Outcome] = {}
        matchers: dict[int, Matcher] = {}
        for i, sequence in enumerate(sequences):
            if sequence.sampling.grammar is not None:
                try:
                    matchers[i] = self._followed_matcher(sequence, sequence.sampling.grammar)
                except GrammarError as error:
                    failures[i] = Outcome(failure=str(error))
        if matchers:
            masks = self._grammars.masks(list(matchers.values()))
            for mask, (i, matcher) in zip(masks, matchers.items(), strict=True):
                hold_back(mask, rules[i].held_back_ids.tolist())
                if matcher.failure is not None:
                    failures[i] = Outcome(failure=matcher.failure)
            apply_masks(logits, list(matchers), masks)
        return failures

    def _followed_matcher(self, sequence: Sequence, grammar: str) -> Matcher:
        matcher = self._matchers.get(sequence)
        if matcher is None:
            matcher = self._matchers[sequence] = self._grammars.matcher(grammar)
        matcher.consume(sequence.token_ids[sequence.num_prompt_tokens + matcher.num_consumed :])
        return matcher


def _outcome(token_id: int | None, otherwise: Outcome) -> Outcome:
    return otherwise if token_id is None else Outcome(token_id)


def _report_logprobs(logits: Tensor, sequences: Seq[Sequence], outcomes: list[Outcome]) -> None:
    """Complete, in place, the outcomes of those who asked."""
    wanted = [
        (i, token_id, num_top)
        for i, sequence in enumerate(sequences)
        if (num_top := sequence.sampling.logprobs) is not None and (token_id := outcomes[i].token_id) is not None
    ]
    if not wanted:
        return
    index, token_ids, num_tops = (list(column) for column in zip(*wanted, strict=True))
    found = token_logprobs(logits[torch.tensor(index, device=logits.device)], token_ids, num_tops)
    for i, logprobs in zip(index, found, strict=True):
        outcomes[i] = replace(outcomes[i], logprobs=(logprobs,))
