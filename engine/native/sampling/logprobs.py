"""Log probabilities of tokens, and the likeliest tokens beside them, from the model's own logits.

Knows logits and token ids; not sequences, and nothing of what sampling options make of the logits.
"""

import torch
from torch import Tensor

from engine.interface import TokenLogprobs

_ROWS_AT_ONCE = 64  # a prompt has a row for each token: in float32, and several times, they would fill the memory
_IMPOSSIBLE = -9999.0  # OpenAI's figure for a probability of 0: JSON knows no infinity


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """For every row of (rows, vocab) logits those of one token, and of the `num_top` likeliest ones."""
    found: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        found += _of_few_rows(logits[rows], token_ids[rows], num_top[rows])
    return found


def _of_few_rows(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(-1).nan_to_num_(nan=_IMPOSSIBLE).clamp_(min=_IMPOSSIBLE)
    own = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    ids, values = _likeliest(logprobs, min(max(num_top), logits.shape[-1]))
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for token_id, logprob, count, row_ids, row_values in zip(token_ids, own, num_top, ids, values, strict=True)
    ]


def _likeliest(logprobs: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and values, likeliest first; of equal ones the lower id."""
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
    """The `count` likeliest where several tokens share the `last` place's value: `topk` leaves open which of them it
    takes, and logits in bfloat16 are often equal."""
    is_above, is_level = logprobs > last, logprobs == last
    num_level_wanted = count - is_above.sum(-1, keepdim=True)
    is_wanted = is_above | (is_level & (is_level.cumsum(-1) <= num_level_wanted))
    return is_wanted.nonzero()[:, 1].view(-1, count)
