"""Compute the log probabilities of given tokens and of the likeliest tokens, from the model's unaltered logits.

Knows logits and token ids; does not know sequences or sampling options.
"""

import torch
from torch import Tensor

from engine.interface import TokenLogprobs

_ROWS_AT_ONCE = 64  # rows per pass: several float32 copies of all rows of a long prompt would exceed the memory
_IMPOSSIBLE = -9999.0  # OpenAI's value for a probability of 0: JSON has no infinity


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Return for each row of `logits` (rows, vocab) the log probability of one token and of the likeliest tokens.

    Row i reports `token_ids[i]` and its `num_top[i]` likeliest tokens. Log probabilities are natural logarithms.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        found += _logprobs_of_rows(logits[rows], token_ids[rows], num_top[rows])
    return found


def _logprobs_of_rows(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Return the result of `token_logprobs` for at most `_ROWS_AT_ONCE` rows."""
    logprobs = logits.float().log_softmax(-1).nan_to_num_(nan=_IMPOSSIBLE).clamp_(min=_IMPOSSIBLE)
    given = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    ids, values = _likeliest(logprobs, min(max(num_top), logits.shape[-1]))
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for token_id, logprob, count, row_ids, row_values in zip(token_ids, given, num_top, ids, values, strict=True)
    ]


def _likeliest(logprobs: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return the ids and the values of the `count` likeliest tokens of each row of `logprobs` (rows, vocab), float32.

    Tokens are sorted from the most to the least likely; tokens with equal values are sorted by id.
    """
    if count == 0:
        return [[]] * len(logprobs), [[]] * len(logprobs)
    candidates = logprobs.topk(min(count + 1, logprobs.shape[-1]))
    ids, last = candidates.indices[:, :count], candidates.values[:, count - 1 : count]
    if candidates.values.shape[-1] > count:
        contested = (last == candidates.values[:, count:]).nonzero()[:, 0]
        if len(contested):
            ids[contested] = _lowest_ids(logprobs[contested], last[contested], count)
    ids = ids.sort(dim=-1).values
    values, order = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order).tolist(), values.tolist()


def _lowest_ids(logprobs: Tensor, last: Tensor, count: int) -> Tensor:
    """Return the ids (rows, count) of the likeliest tokens, in ascending order.

    `last` (rows, 1) is the lowest value among the likeliest tokens. If more tokens have this value than are needed,
    those with the lowest ids are returned. `topk` does not define which of several equal values it returns, and logits
    in bfloat16 are often equal.
    """
    is_above, is_level = logprobs > last, logprobs == last
    num_level_wanted = count - is_above.sum(-1, keepdim=True)
    is_wanted = is_above | (is_level & (is_level.cumsum(-1) <= num_level_wanted))
    return is_wanted.nonzero()[:, 1].view(-1, count)
