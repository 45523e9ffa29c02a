"""Sample the next token of each sequence of a step, with all of its sampling parameters.

Knows the order of the sampling steps, and keeps token counts and grammar states between steps of the engine; does not
know models, chunks or blocks. Each row is sampled on its own, in this order:

    log probabilities ← the model's logits
    bias → repetition, presence and frequency penalty → min_tokens, bad words, allowed tokens → grammar → temperature
    → top_k → top_p → min_p

This is transformers' order. Rows with none of the options before the temperature skip the steps that alter logits.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from engine.grammar import Bits, Grammars, Matcher, forbid_tokens
from engine.interface import EngineInfo, GrammarError, SamplingParams
from engine.native.sampling.logprobs import token_logprobs
from engine.sampling.penalties import Penalties, add_bias, apply_penalties, forbid
from engine.sampling.sampler import Sampler, SamplingRow, sample
from engine.sampling.sequence_state import BROKEN_LOGITS, NOTHING_LEFT, SequenceStates
from engine.sequences.chunk import Outcome
from engine.sequences.sequence import Sequence

_BROKEN = Outcome(failure=BROKEN_LOGITS)
_NOTHING_LEFT = Outcome(failure=NOTHING_LEFT)
_GREEDY = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0)


class SamplingPipeline:
    """A sampler that keeps the state of each sequence between steps."""

    def __init__(self, info: EngineInfo, sampler: Sampler = sample) -> None:
        self._sampler = sampler
        self.grammars = Grammars(info)
        self._states = SequenceStates(info.vocab_size)

    def sample(self, logits: Tensor, sequences: Seq[Sequence], ahead: Seq[int] = ()) -> list[Outcome]:
        """Return one outcome per row of logits. An error that concerns one row is the `failure` of its outcome.

        `logits` (rows, vocab) have any floating-point dtype and are not changed. Row i is of `sequences[i]`, whose next
        token it samples; or the one that comes `ahead[i]` tokens later, if its logits are not altered.
        """
        # Rows that alter logits are sampled greedily at first, only to check that the model's logits are finite: a mask
        # could hide logits that are not finite.
        rows = [
            _GREEDY if s.alters_logits else SamplingRow(s.sampling, s.num_output_tokens + later)
            for s, later in zip(sequences, ahead or repeat(0), strict=False)
        ]
        outcomes = [_outcome(token_id, _BROKEN) for token_id in self._sampler(logits, rows)]
        altered = [i for i, s in enumerate(sequences) if s.alters_logits and outcomes[i].failure is None]
        if altered:
            # Indexing makes a copy, so the model's logits stay unchanged.
            altered_logits = logits[torch.tensor(altered, device=logits.device)].float()
            found = self._sample_altered(altered_logits, [sequences[i] for i in altered])
            for i, outcome in zip(altered, found, strict=True):
                outcomes[i] = outcome
        _report_logprobs(logits, sequences, outcomes)
        return outcomes

    def _sample_altered(self, logits: Tensor, sequences: list[Sequence]) -> list[Outcome]:
        """Alter `logits` (sequences, vocab), float32, in place by all options; sample and return the outcomes."""
        penalties = [self._states.penalties(sequence) for sequence in sequences]
        add_bias(logits, penalties)
        apply_penalties(logits, penalties)
        forbid(logits, penalties)
        failures = self._mask_by_grammar(logits, sequences, penalties)
        token_ids = self._sampler(logits, [SamplingRow(s.sampling, s.num_output_tokens) for s in sequences])
        return [failures.get(i) or _outcome(token_id, _NOTHING_LEFT) for i, token_id in enumerate(token_ids)]

    def _mask_by_grammar(
        self, logits: Tensor, sequences: list[Sequence], penalties: list[Penalties]
    ) -> dict[int, Outcome]:
        """Mask `logits` (sequences, vocab) in place; return a failed outcome for each row whose grammar failed."""
        matchers, failures = self._updated_matchers(sequences)
        if matchers:
            masks = self.grammars.masks(list(matchers.values()))
            for mask, (i, matcher) in zip(masks, matchers.items(), strict=True):
                forbid_tokens(mask, penalties[i].forbidden_ids.tolist())
                if matcher.failure is not None:
                    failures[i] = Outcome(failure=matcher.failure)
            apply_masks(logits, list(matchers), masks)
        return failures

    def _updated_matchers(self, sequences: list[Sequence]) -> tuple[dict[int, Matcher], dict[int, Outcome]]:
        """Return the matchers of the rows with a grammar, and a failed outcome for each row whose grammar failed."""
        matchers: dict[int, Matcher] = {}
        failures: dict[int, Outcome] = {}
        for i, sequence in enumerate(sequences):
            if sequence.sampling.grammar is not None:
                try:
                    matchers[i] = self._states.matcher(sequence)
                except GrammarError as error:
                    failures[i] = Outcome(failure=str(error))
        return matchers, failures


def _outcome(token_id: int | None, otherwise: Outcome) -> Outcome:
    """Return the outcome of a sampled token, or `otherwise` if no token was sampled."""
    return otherwise if token_id is None else Outcome((token_id,))


def _report_logprobs(logits: Tensor, sequences: Seq[Sequence], outcomes: list[Outcome]) -> None:
    """Add log probabilities, in place, to the `outcomes` of the sequences that asked for them."""
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


def apply_masks(logits: Tensor, rows: list[int], bits: Bits) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    `logits` is (all rows, vocab) in float32. `bits` is (len(rows), words): `bits[i]` is the mask of row `rows[i]` of
    the logits. Tokens that the tokenizer does not have are forbidden, too.
    """
    octets = torch.from_numpy(bits.view(np.uint8)).to(logits.device)
    # A table maps each of the 256 octets to eight flags (true if forbidden), which are packed as one int64. So one
    # gather from the table expands all bits.
    flags = (torch.arange(256, device=logits.device)[:, None] >> torch.arange(8, device=logits.device)) & 1 == 0
    forbidden = flags.view(torch.int64)[:, 0][octets.int()].view(torch.bool)
    forbidden = torch.nn.functional.pad(forbidden, (0, logits.shape[-1] - forbidden.shape[-1]), value=True)
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill_(forbidden, float("-inf"))
