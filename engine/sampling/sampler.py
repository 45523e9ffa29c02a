"""Sample the next token of each row of a batch of logits.

Knows logits, sampling parameters and output positions; does not know sequences or models. A token depends only on its
own row, seed and position, not on other rows of the batch, on preemption or on the worker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

from engine.interface import SamplingParams

_GREEDY_BELOW = 1e-5  # lower temperatures are sampled greedily: dividing by them would overflow float32
# The thresholds of top_p and top_k are first searched among this many of the likeliest tokens: a full sort takes 20
# times as long.
_NUM_CANDIDATES = (256, 4096)
_MASK_64 = (1 << 64) - 1


class Sampler(Protocol):
    """A function that samples a token id for each row of logits (rows, vocab); None if the maximum is not finite."""

    def __call__(self, logits: Tensor, rows: list["SamplingRow"]) -> list[int | None]: ...


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The sampling parameters of one row of logits.

    The seed in `params` and `index` together determine the random number of the row.
    """

    params: SamplingParams
    index: int  # number of output tokens of the sequence so far

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW or self.params.top_k == 1

    @property
    def is_narrowed(self) -> bool:
        """Whether top_k, top_p or min_p may exclude tokens."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


# A sampler whose token ids (rows,), int64, stay on the device of the logits; -1 in place of None.
DeviceSampler = Callable[[Tensor, list[SamplingRow]], Tensor]


def on_host(sampler: DeviceSampler) -> Sampler:
    """Return the sampler that waits for the token ids of `sampler`."""

    def sample_on_host(logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
        return [token_id if token_id >= 0 else None for token_id in sampler(logits, rows).tolist()]

    return sample_on_host


def sample_ids(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Return a token id per row of `logits` (rows, vocab): (rows,), int64, on their device.

    It is -1 for a row with NaN or +inf, or with -inf only.
    """
    best, token_ids = logits.max(dim=-1)  # propagates NaN
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    if len(drawn) == len(rows):
        token_ids = _draw(logits, rows)
    elif drawn:
        index = torch.tensor(drawn, device=logits.device)
        token_ids = token_ids.index_copy(0, index, _draw(logits[index], [rows[i] for i in drawn]))
    return torch.where(best.isfinite(), token_ids, -1)


sample = on_host(sample_ids)


def _draw(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Draw a token id per row of `logits` (rows, vocab) by inverse transform sampling; return (rows,), int64.

    The cumulative distribution, in token order, is inverted at one uniform number per row. Tokens that top_k, top_p and
    min_p exclude have probability 0, so no sorting is needed here.
    """
    temperatures, uniforms = _columns([(row.params.temperature, uniform(row)) for row in rows], logits.device)
    scaled = logits.to(torch.float32, copy=True).div_(temperatures)
    if any(row.is_narrowed for row in rows):
        scaled = torch.where(scaled >= _lowest_kept(scaled, [row.params for row in rows]), scaled, float("-inf"))
    cumulative = scaled.softmax(-1).cumsum_(-1)
    total = cumulative[:, -1:]
    # Rounding must not raise a target to the total itself: only tokens with probability 0 come after the total.
    targets = torch.minimum(uniforms * total, total * (1 - 2**-22))
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def _lowest_kept(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return the lowest logit that top_k, top_p and min_p keep in each row of `scaled` (rows, vocab): (rows, 1)."""
    lowest = torch.full((len(params), 1), float("-inf"), device=scaled.device)
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:
        index = torch.tensor(cut, device=scaled.device)
        lowest[index] = _thresholds(scaled if len(cut) == len(params) else scaled[index], [params[i] for i in cut])
    min_ps = [p.min_p for p in params]
    if any(min_ps):
        # min_p is relative to the likeliest token. In logits it is a distance, which top_k and top_p do not change.
        distances = torch.tensor([[log(p) if p > 0 else float("-inf")] for p in min_ps], device=scaled.device)
        lowest = torch.maximum(lowest, scaled.amax(-1, keepdim=True) + distances)
    return lowest


def _thresholds(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return the lowest logit that top_k and top_p keep in each row of `scaled` (rows, vocab): (rows, 1).

    Each row first keeps its top_k likeliest tokens, then the smallest set of the likeliest of these tokens whose
    probabilities sum to at least top_p. Tokens whose logit equals the lowest kept logit are kept, too.
    """
    vocab_size = scaled.shape[-1]
    top_ks, top_ps = _columns(
        [(p.top_k if 0 < p.top_k < vocab_size else vocab_size, p.top_p) for p in params], scaled.device
    )
    totals = scaled.logsumexp(-1, keepdim=True)
    thresholds = torch.empty_like(totals)
    rest = torch.arange(len(params), device=scaled.device)
    for num_candidates in (*(n for n in _NUM_CANDIDATES if n < vocab_size), vocab_size):
        # Only rows that need more candidates get more: with more candidates, the sums of a row round differently.
        candidates = scaled if len(rest) == len(scaled) else scaled[rest]
        values = candidates.topk(num_candidates).values
        cuts, is_complete = _cut(values, totals[rest], top_ks[rest], top_ps[rest], vocab_size)
        thresholds[rest] = cuts
        rest = rest[~is_complete]
        if not len(rest):
            break
    return thresholds


def _cut(values: Tensor, totals: Tensor, top_ks: Tensor, top_ps: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the threshold of top_k and top_p of each row, (rows, 1), and whether it is final, (rows,) bool.

    `values` (rows, candidates) are the highest logits in descending order. `totals`, `top_ks` and `top_ps` are (rows,
    1); `totals` are the logsumexps of the whole rows. A threshold is not final if it may lie below the candidates.
    """
    num_values = values.shape[-1]
    in_top_k = torch.arange(num_values, device=values.device) < top_ks
    top_k_totals = values.masked_fill(~in_top_k, float("-inf")).logsumexp(-1, keepdim=True)
    is_limited = top_ks < vocab_size
    probabilities = (values - torch.where(is_limited, top_k_totals, totals)).exp()
    before = probabilities.cumsum(-1) - probabilities
    kept = in_top_k & (before < top_ps)
    kept[:, 0] = True
    num_kept = kept.sum(-1, keepdim=True)
    is_complete = torch.where(is_limited, top_ks <= num_values, num_kept < num_values)
    return values.gather(-1, num_kept - 1), is_complete[:, 0] | (num_values == vocab_size)


def _columns(pairs: list[tuple[float, float]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the second items of `pairs` as float32 columns (rows, 1) on `device`."""
    columns = torch.tensor(pairs, dtype=torch.float32).to(device, non_blocking=True)
    return columns[:, :1], columns[:, 1:]


def uniform(row: SamplingRow) -> float:
    """Return a random number in (0, 1) that depends only on seed and index (splitmix64: Steele, Lea and Flood 2014).

    The number has 23 random bits, so that float32 represents it exactly.
    """
    bits = _mix(_mix(row.params.seed & _MASK_64) + row.index)
    return ((bits >> 41) + 0.5) / (1 << 23)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
