"""Alter logits before a token is sampled: add logit bias, apply penalties, and forbid tokens.

Stop tokens are forbidden before `min_tokens`, the last token of a bad word after its other tokens, and all tokens that
are not allowed.

Knows logits and the tokens of sequences; does not know grammars or sampling. All affected rows are changed together:
numpy concatenates the indices of their tokens, and the device gathers, computes and scatters once.
"""

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.interface import SamplingParams
from engine.sequences.sequence import Sequence

Ids = npt.NDArray[np.int64]


class Penalties:
    """The logit bias, penalties and forbidden tokens of one sequence.

    All of these depend only on the sequence's parameters and tokens, so a preempted and resumed sequence gets the same
    logits.
    """

    __slots__ = ("params", "counts", "bias_ids", "biases", "_stop_ids", "forbidden_ids", "allowed_ids")

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        params = self.params = sequence.sampling
        self.counts: TokenCounts | None = None
        if _has_penalties(params):
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            self.counts = TokenCounts(prompt if params.repetition_penalty != 1 else ())
        bias = [(token_id, value) for token_id, value in params.logit_bias if 0 <= token_id < vocab_size]
        self.bias_ids: Ids = np.array([token_id for token_id, _ in bias], dtype=np.int64)
        self.biases = np.array([value for _, value in bias], dtype=np.float32)
        self._stop_ids: Ids = np.array([i for i in sequence.stop_ids if 0 <= i < vocab_size], dtype=np.int64)
        self.forbidden_ids = self._stop_ids  # stop tokens before `min_tokens`, and tokens that would end a bad word
        allowed = [token_id for token_id in params.allowed_token_ids if 0 <= token_id < vocab_size]
        self.allowed_ids: Ids = np.array(allowed, dtype=np.int64)

    def update(self, sequence: Sequence) -> None:
        """Count the tokens that `sequence` has received since the last call; update `forbidden_ids`."""
        if self.counts is not None:
            self.counts.count(sequence.token_ids[sequence.num_prompt_tokens + self.counts.num_counted :])
        must_go_on = sequence.num_output_tokens < self.params.min_tokens
        self.forbidden_ids = self._stop_ids if must_go_on else self._stop_ids[:0]
        if self.params.bad_words:
            ends = np.array(_ends_of_bad_words(sequence), dtype=np.int64)
            self.forbidden_ids = np.concatenate([self.forbidden_ids, ends])


def apply_penalties(logits: Tensor, penalties: list[Penalties]) -> None:
    """Apply all penalties to `logits` (rows, vocab), float32, in place; row i has `penalties[i]`.

    The repetition penalty is applied first, as Hugging Face defines it: it divides the positive logits of all tokens
    in prompt or output, and multiplies the negative logits of these tokens. Presence and frequency penalty are applied
    next, as OpenAI defines them: the logit of a token in the output loses presence + frequency · (the token's count in
    the output).
    """
    penalised = [(row, p.params, p.counts) for row, p in enumerate(penalties) if p.counts is not None]
    if not penalised:
        return
    ids = [counts.token_ids for _, _, counts in penalised]
    index = _flat_index(logits, [row for row, _, _ in penalised], ids)
    factors, reductions = _to_device(
        logits,
        np.repeat(np.array([p.repetition_penalty for _, p, _ in penalised], np.float32), [len(i) for i in ids]),
        np.concatenate([_reductions(params, counts.output_counts) for _, params, counts in penalised]),
    )
    flat = logits.view(-1)
    values = flat[index]
    flat[index] = torch.where(values > 0, values / factors, values * factors) - reductions


def add_bias(logits: Tensor, penalties: list[Penalties]) -> None:
    """Add the logit biases to `logits` (rows, vocab), float32, in place; row i has `penalties[i]`."""
    rows = [row for row, p in enumerate(penalties) if len(p.bias_ids)]
    if rows:
        index = _flat_index(logits, rows, [penalties[row].bias_ids for row in rows])
        (biases,) = _to_device(logits, np.concatenate([penalties[row].biases for row in rows]))
        logits.view(-1).index_add_(0, index, biases)


def forbid(logits: Tensor, penalties: list[Penalties]) -> None:
    """Set the logits of the forbidden tokens of each row to -inf, and those of all tokens that are not allowed.

    `logits` (rows, vocab) are changed in place; row i has `penalties[i]`. The forbidden tokens of rows with a grammar
    are left out: the grammar's mask forbids them, except where no other token is allowed.
    """
    rows = [row for row, p in enumerate(penalties) if p.params.grammar is None and len(p.forbidden_ids)]
    if rows:
        index = _flat_index(logits, rows, [penalties[row].forbidden_ids for row in rows])
        logits.view(-1).index_fill_(0, index, float("-inf"))
    for row, own in enumerate(penalties):
        if len(own.allowed_ids):
            allowed = torch.from_numpy(own.allowed_ids).to(logits.device)
            kept = logits[row, allowed]
            logits[row] = float("-inf")
            logits[row, allowed] = kept


def _ends_of_bad_words(sequence: Sequence) -> list[int]:
    """Return the tokens that would complete a bad word after the output so far."""
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    words = sequence.sampling.bad_words
    return [word[-1] for word in words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]]


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def _reductions(params: SamplingParams, counts: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the amount that presence and frequency penalty subtract from the logit of each token.

    `counts` are the occurrences of these tokens in the output.
    """
    presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
    return presence * (counts > 0) + frequency * counts


def _flat_index(logits: Tensor, rows: list[int], ids: list[Ids]) -> Tensor:
    """Return the indices of some logits in the flattened `logits`, int64, concatenated.

    For each i, these are the logits of the tokens `ids[i]` in row `rows[i]`.
    """
    vocab_size = logits.shape[-1]
    flat = [row_ids + row * vocab_size for row, row_ids in zip(rows, ids, strict=True)]
    return torch.from_numpy(np.concatenate(flat)).to(logits.device)


def _to_device(logits: Tensor, *arrays: npt.NDArray[np.float32]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array).to(logits.device) for array in arrays)


class TokenCounts:
    """The counts of the distinct tokens of prompt and output, in the order of the tokens' first appearance.

    Counting the tokens step by step gives the same result as counting them all at once.
    """

    __slots__ = ("_places", "_token_ids", "_counts", "num_counted")

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = array("q", self._places)
        self._counts = array("q", bytes(8 * len(self._places)))
        self.num_counted = 0  # output tokens counted so far

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The ids of the distinct tokens of prompt and output, (distinct tokens,)."""
        return np.array(self._token_ids, dtype=np.int64)

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """The occurrences of each distinct token in the output, (distinct tokens,); 0 for prompt-only tokens."""
        return np.array(self._counts, dtype=np.float32)

    def count(self, output_token_ids: Iterable[int]) -> None:
        """Count the next tokens of the output."""
        for token_id in output_token_ids:
            place = self._places.setdefault(token_id, len(self._token_ids))
            if place == len(self._token_ids):
                self._token_ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1
            self.num_counted += 1
