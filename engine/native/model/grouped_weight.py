"""Matrices as codes of 4 or 8 bits, with a scale for each group of inputs: the one form of all quantised weights.

Knows numbers; does not know layers or files. Blocks of GGUF files fit this form exactly, apart from rounding scales to
float16.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Self

import torch
from torch import Tensor, nn

from engine.config import Quantization

BITS: dict[Quantization, int] = {"int8": 8, "int4": 4}  # of a code
FINE_SHARE = 0.4  # of the weights of an int4 model, beside its output layer, that have 8 bits
GROUP = 32  # inputs of a group; 16 in some files
_AT_ONCE = 1 << 18  # numbers that are unpacked or rounded together: as float32, a few such tensors stay in the caches
_TINY = torch.finfo(torch.float32).tiny
_RANGES = (1.0, 0.9, 0.8)  # parts of a group's range that its codes may cover
_FITS = 2  # times that scale and offset are fitted to the codes
_LOWEST = -126  # exponent of the smallest unit
_HIGHEST = 15  # scales and offsets are below 2^15, so that float16 holds scales that are 2^28 times smaller exactly


class GroupedWeight(nn.Module):
    """A matrix (out, in): unit · (scale · (code - zero) + offset), with a unit for each output.

    Zero is half of the codes' range without offsets (8 or 128), otherwise 0. Attributes: `codes` (out, in · bits / 8),
    uint8; `scales` and `offsets` (out, groups), float16; `units` (out,), float32, powers of two. With 4 bits, byte j of
    a group has the code of input j in its lower half and the code of input j + 16 in its upper half.
    """

    codes: Tensor
    scales: Tensor
    units: Tensor
    offsets: Tensor | None

    def __init__(
        self, codes: Tensor, scales: Tensor, offsets: Tensor | None, units: Tensor, bits: int, in_features: int
    ) -> None:
        super().__init__()
        self.codes, self.scales, self.units = nn.Buffer(codes), nn.Buffer(scales), nn.Buffer(units)
        self.register_buffer("offsets", offsets)
        self.bits, self.out_features, self.in_features = bits, len(codes), in_features

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, in_features: int) -> Self:
        """Return the matrix with `codes` (out, groups, group), uint8, and with float32 `scales` and `offsets`."""
        largest = scales.abs().amax(dim=1)
        if offsets is not None:
            largest = torch.maximum(largest, offsets.abs().amax(dim=1))
        exponents = torch.where(largest > 0, torch.frexp(largest).exponent - _HIGHEST, 0).clamp(min=_LOWEST)
        units = torch.ldexp(torch.ones_like(largest), exponents)
        halves = [None if t is None else (t / units[:, None]).to(torch.float16) for t in (scales, offsets)]
        if bits == 4:
            lower, upper = codes.chunk(2, dim=-1)
            codes = lower | upper << 4
        assert halves[0] is not None
        return cls(codes.flatten(1).contiguous(), halves[0], halves[1], units, bits, in_features)

    @property
    def group(self) -> int:
        """The number of inputs of a group: 16 with codes of 8 bits in some files, otherwise 32."""
        return self.codes.shape[1] * 8 // (self.bits * self.scales.shape[1])

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What matrices have in common that can be joined."""
        return self.bits, self.group, self.offsets is not None

    def rows(self, which: slice | Tensor) -> "GroupedWeight":
        """Return the matrix with some of the rows, or with the rows in another order."""
        offsets = None if self.offsets is None else self.offsets[which]
        return GroupedWeight(
            self.codes[which], self.scales[which], offsets, self.units[which], self.bits, self.in_features
        )

    def inputs(self, first: int, number: int) -> "GroupedWeight":
        """Return the matrix with `number` of the inputs from `first` on, both multiples of a group."""
        groups = slice(first // self.group, (first + number) // self.group)
        codes = self.codes.view(len(self.codes), self.scales.shape[1], -1)[:, groups].flatten(1)
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return GroupedWeight(codes, self.scales[:, groups], offsets, self.units, self.bits, number)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (out, in) in `dtype`."""
        step = max(1, _AT_ONCE // self.in_features)
        parts = [self.rows(slice(i, i + step))._plain().to(dtype) for i in range(0, self.out_features, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def separate_codes(self) -> Tensor:
        """Return the codes (out, groups, group), uint8, one a byte."""
        codes = self.codes.view(len(self.codes), self.scales.shape[1], -1)
        return codes if self.bits == 8 else torch.cat([codes & 15, codes >> 4], dim=-1)

    def _plain(self) -> Tensor:
        scales, units = self.scales.float()[..., None], self.units[:, None]
        values = self.separate_codes().float()
        if self.offsets is None:
            values = (values - (1 << self.bits - 1)) * scales
        else:
            values = values * scales + self.offsets.float()[..., None]
        return values.flatten(1)[:, : self.in_features] * units


def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Return the matrices of one kind as one matrix, below each other."""
    if len(weights) == 1:
        return weights[0]
    codes, scales, units = (torch.cat([getattr(w, name) for w in weights]) for name in ("codes", "scales", "units"))
    offsets = None if weights[0].offsets is None else torch.cat([w.offsets for w in weights if w.offsets is not None])
    return GroupedWeight(codes, scales, offsets, units, weights[0].bits, weights[0].in_features)


def joined(weights: Iterable[GroupedWeight]) -> list[GroupedWeight]:
    """Return the matrices below each other, where neighbours of the same kind are one matrix."""
    return [stacked(list(same)) for _, same in groupby(weights, lambda weight: weight.kind)]


def rounded(weight: Tensor, bits: int, importance: Tensor | None = None) -> GroupedWeight:
    """Return `weight` (out, in) rounded to codes of `bits` bits. A group whose weights are all 0 stays 0.

    `importance` (in,) says how much an input's error counts, positive: the mean square of its activations. Unset: all
    count the same. With 8 bits they do in any case.
    """
    shares = torch.ones(weight.shape[1]) if importance is None else importance.float() / importance.float().mean()
    shares = nn.functional.pad(shares, (0, -len(shares) % GROUP)).view(1, -1, GROUP)
    parts = []
    for rows in torch.split(weight.detach(), max(1, _AT_ONCE // weight.shape[1])):
        padded = nn.functional.pad(rows.float(), (0, -rows.shape[1] % GROUP))  # zeros fill the last group
        groups = padded.view(len(padded), -1, GROUP)
        codes, scales, offsets = _to_bytes(groups) if bits == 8 else _to_nibbles(groups, shares)
        parts.append(GroupedWeight.of(codes, scales, offsets, bits, weight.shape[1]))
    return stacked(parts)


def quantised_bytes(weight: Tensor, kind: Quantization, is_output: bool) -> float:
    """Return the most bytes that `weight` (…, out, in) takes in a quantised model, on the average of its layers."""
    fine = 1 if kind == "int8" or is_output else FINE_SHARE
    return fine * rounded_bytes(weight, 8) + (1 - fine) * rounded_bytes(weight, 4)


def rounded_bytes(weight: Tensor, bits: int) -> int:
    """Return the size in bytes of `weight` (…, out, in) after `rounded`."""
    groups = -(-weight.shape[-1] // GROUP)
    return weight.shape[:-1].numel() * (groups * (GROUP * bits // 8 + (2 if bits == 8 else 4)) + 4)


def _to_bytes(groups: Tensor) -> tuple[Tensor, Tensor, None]:
    """Return codes (out, groups, 32) and scales (out, groups) for numbers (out, groups, 32)."""
    scales = groups.abs().amax(dim=-1) / 127
    codes = (groups / scales.clamp(min=_TINY)[..., None]).round_().clamp_(-127, 127)
    return (codes + 128).to(torch.uint8), scales, None


def _to_nibbles(groups: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (out, groups, 32), scales and offsets (out, groups) for numbers (out, groups, 32).

    Tries the whole range of each group and narrower ones. Each gets scale and offset by least squares, where an input's
    error counts as much as `shares` (1, groups, 32) says, and new codes after that.
    """
    lowest, highest = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    shares = shares / shares.sum(dim=-1, keepdim=True)
    best: list[Tensor] | None = None
    for part in _RANGES:
        scales = (highest - lowest) * (part / 15)
        offsets = (highest + lowest) / 2 - 7.5 * scales
        for _ in range(_FITS):
            codes = ((groups - offsets) / torch.where(scales == 0, 1, scales)).round_().clamp_(0, 15)
            deviations = codes - (codes * shares).sum(dim=-1, keepdim=True)
            spread = (deviations.square() * shares).sum(dim=-1, keepdim=True)
            fitted = (deviations * groups * shares).sum(dim=-1, keepdim=True) / spread.clamp(min=_TINY)
            scales = torch.where(spread > _TINY, fitted, scales)
            offsets = ((groups - codes * scales) * shares).sum(dim=-1, keepdim=True)
        errors = ((codes * scales + offsets - groups).square() * shares).sum(dim=-1, keepdim=True)
        found = [errors, codes, scales, offsets]
        if best is None:
            best = found
        else:
            best = [torch.where(errors < best[0], new, old) for new, old in zip(found, best, strict=True)]
    assert best is not None
    _, codes, scales, offsets = best
    return codes.to(torch.uint8), scales.squeeze(-1), offsets.squeeze(-1)
