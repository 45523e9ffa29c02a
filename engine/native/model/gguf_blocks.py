"""Blocks of GGUF files as codes by groups. The layouts are those of llama.cpp's `ggml-quants.c`.

Knows the kinds of blocks that fit a `GroupedWeight`; does not know names of tensors or models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.native.model.grouped_weight import GroupedWeight, stacked

_AT_ONCE = 1 << 22  # bytes that are read together, which limits the memory of what is made of them
# The 16 codes of IQ4_NL and IQ4_XS as codes of 8 bits: 128 is 0.
_UNEVEN = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)
# Codes (rows, groups, group), scales and offsets (rows, groups), and the bits of a code.
_Parts = tuple[Tensor, Tensor, Tensor | None, int]


def weight_of(rows: Tensor, kind: str, in_features: int) -> GroupedWeight:
    """Return the matrix whose `rows` (out, bytes), uint8, are blocks of `kind`, one of `KEPT`."""
    block_bytes, read = KEPT[kind]
    parts = []
    for some in torch.split(rows, max(1, _AT_ONCE // rows.shape[1])):
        codes, scales, offsets, bits = read(some.reshape(-1, block_bytes))
        scales = scales.reshape(len(some), -1)
        offsets = None if offsets is None else offsets.reshape(len(some), -1)
        parts.append(GroupedWeight.of(codes.reshape(*scales.shape, -1), scales, offsets, bits, in_features))
    return stacked(parts)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte `start` of each block, as float32 (blocks, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the codes of `packed` (…, n): all lower halves, then all upper halves, (…, 2n)."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of `packed` (blocks, n), (blocks, 8n), the lowest of each byte first."""
    places = torch.arange(8, dtype=torch.uint8)
    return (packed[..., None] >> places & 1).flatten(1)


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:] ^ 0x80, _half(blocks, 0), None, 8


def _q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None, 4


def _q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2), 4


def _q5_0(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return codes + (128 - 16), _half(blocks, 0), None, 8


def _q5_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, _half(blocks, 0), _half(blocks, 2), 8


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets (blocks, 8) of Q4_K and Q5_K: products of a block's numbers and 6-bit numbers."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    lowest = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return _half(blocks, 0) * scales.float(), -_half(blocks, 2) * lowest.float()


def _q4_k(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_six_bit_scales(blocks), 4


def _q5_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return low | high << 4, *_six_bit_scales(blocks), 8


def _q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (low | high << 4) + (128 - 32), scales, None, 8


def _q3_k(blocks: Tensor) -> _Parts:
    low = blocks[:, 32:96].reshape(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    high = blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    upper = blocks[:, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = (_nibbles(blocks[:, 96:104]) | upper.flatten(1) << 4).float() - 32
    return (low.reshape(-1, 8, 32) | high << 2) + (128 - 4), scales * _half(blocks, 108), None, 8


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _UNEVEN[_nibbles(blocks[:, 2:]).int()], _half(blocks, 0), None, 8


def _iq4_xs(blocks: Tensor) -> _Parts:
    lower = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=-1).flatten(1)
    upper = (blocks[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1)
    scales = (lower | upper << 4).float() - 32
    return _UNEVEN[_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).int()], scales * _half(blocks, 0), None, 8


# By kind: the bytes of a block, and what reads blocks (number, bytes). Blocks of a row lie side by side.
KEPT: dict[str, tuple[int, Callable[[Tensor], _Parts]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
}
