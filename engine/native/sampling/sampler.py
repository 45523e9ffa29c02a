"""The next token of every row of a batch of logits.

Knows logits, sampling parameters and output positions; not sequences or models. A token depends on its own
row, seed and position only: neighbours in the batch, preemption and the worker make no difference.
"""

from dataclasses import dataclass
from math import log
from typing import Protocol

import torch
from torch import Tensor

from engine.interface import SamplingParams

_GREEDY_BELOW = 1e-5  # temperatures under this are greedy: dividing by them overflows
_NUM_CANDIDATES = (256, 4096)  # where top_p and top_k are looked for first: a full sort costs 20 times as much
_MASK_64 = (1 << 64) - 1


class Sampler(Protocol):
    """(rows, vocab) logits to a token id a row; None where a row's logits are not finite."""

    def __call__(self, logits: Tensor, rows: list["SamplingRow"]) -> list[int | None]: ...


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """`index` counts the sequence's output tokens so far: with the seed it names one random number."""

    params: SamplingParams
    index: int

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW or self.params.top_k == 1

    @property
    def is_narrowed(self) -> bool:
        """Some tokens are left out."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


def sample(logits: Tensor, rows: list[SamplingRow]) -> list[int | None]:
    """Token ids for (rows, vocab) logits; None for a row that holds NaN or +inf, or nothing but -inf."""
    return [token_id if token_id >= 0 else None for token_id in sample_ids(logits, rows).tolist()]


def sample_ids(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """The same where the logits are, (rows,): -1 for a row that `sample` has None for."""
    best, token_ids = logits.max(dim=-1)  # propagates NaN
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    if len(drawn) == len(rows):
        token_ids = _draw(logits, rows)
    elif drawn:
        index = torch.tensor(drawn, device=logits.device)
        token_ids = token_ids.index_copy(0, index, _draw(logits[index], [rows[i] for i in drawn]))
    return torch.where(best.isfinite(), token_ids, -1)


def _draw(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Invert the distribution function at one uniform number a row. Tokens that top_k, top_p and min_p leave out are
    flat steps of that function, so the order of equal logits does not matter."""
    temperatures, uniforms = _columns([(row.params.temperature, uniform(row)) for row in rows], logits.device)
    scaled = logits.to(torch.float32, copy=True).div_(temperatures)
    if any(row.is_narrowed for row in rows):
        scaled = torch.where(scaled >= _lowest_kept(scaled, [row.params for row in rows]), scaled, float("-inf"))
    cumulative = scaled.softmax(-1).cumsum_(-1)
    total = cumulative[:, -1:]
    # Rounding must not carry a target up to the total itself, where only tokens of no probability are left.
    targets = torch.minimum(uniforms * total, total * (1 - 2**-22))
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def _lowest_kept(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """The lowest logit that each row keeps, (rows, 1)."""
    lowest = torch.full((len(params), 1), float("-inf"), device=scaled.device)
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:
        index = torch.tensor(cut, device=scaled.device)
        lowest[index] = _thresholds(scaled if len(cut) == len(params) else scaled[index], [params[i] for i in cut])
    min_ps = [p.min_p for p in params]
    if any(min_ps):
        # As a distance from the likeliest logit, the same whatever top_k and top_p have left of the others.
        distances = torch.tensor([[log(p) if p > 0 else float("-inf")] for p in min_ps], device=scaled.device)
        lowest = torch.maximum(lowest, scaled.amax(-1, keepdim=True) + distances)
    return lowest


def _thresholds(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """The lowest logit that top_k and top_p keep of each row, (rows, 1): first its top_k, then of those the fewest
    that make up top_p. Equal logits stay together."""
    vocab_size = scaled.shape[-1]
    top_ks, top_ps = _columns(
        [(p.top_k if 0 < p.top_k < vocab_size else vocab_size, p.top_p) for p in params], scaled.device
    )
    totals = scaled.logsumexp(-1, keepdim=True)
    thresholds = torch.empty_like(totals)
    rest = torch.arange(len(params), device=scaled.device)
    for num_candidates in (*(n for n in _NUM_CANDIDATES if n < vocab_size), vocab_size):
        # Only the rows that need more: in their company, the others' sums would be rounded differently.
        candidates = scaled if len(rest) == len(scaled) else scaled[rest]
        values = candidates.topk(num_candidates).values
        cuts, is_complete = _cut(values, totals[rest], top_ks[rest], top_ps[rest], vocab_size)
        thresholds[rest] = cuts
        rest = rest[~is_complete]
        if not len(rest):
            break
    return thresholds


def _cut(values: Tensor, totals: Tensor, top_ks: Tensor, top_ps: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Thresholds (rows, 1) among the sorted `values`, and which rows (rows,) they reach far enough down for."""
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
    columns = torch.tensor(pairs, dtype=torch.float32).to(device, non_blocking=True)
    return columns[:, :1], columns[:, 1:]


def uniform(row: SamplingRow) -> float:
    """A number in (0, 1) that seed and index determine (splitmix64: Steele, Lea and Flood 2014)."""
    bits = _mix(_mix(row.params.seed & _MASK_64) + row.index)
    return ((bits >> 41) + 0.5) / (1 << 23)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
