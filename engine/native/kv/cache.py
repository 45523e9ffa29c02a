"""The tensors that hold keys and values, in blocks.

All layers of one shape have a common pool with the dimensions (layer, K|V, kv_head, block, slot in block, head_dim).
The head comes before the block, so that gathering the blocks of a batch gives (K|V, kv_head × sequence, context,
head_dim): a batched matrix product takes this without another copy. The part of a block that belongs to one head is
contiguous, so gathering copies rows of block_size × head_dim numbers. Keys and values are in one tensor, so a layer
needs only one gather and one scatter. Knows layers, blocks and slots; does not know sequences.

With FP8, the numbers of a row (a token's key or value in one head) are codes of float8_e4m3fn, and a second pool of the
same dimensions holds one float32 scale for each row: number = code × scale. A row's scale is its largest magnitude ÷
448, so a row depends on its own token only, and nothing has to be calibrated.
"""

import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_BLOCK_DIM = 3  # index of the block dimension in the shape of a pool
FP8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa (OCP 8-bit floating point specification, E4M3)
_FP8_MAX = torch.finfo(FP8).max  # 448
_SCALE = torch.float32


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token's keys, and of its values, in one layer."""

    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype, *, fp8: bool = False) -> int:
        row = self.head_dim + _SCALE.itemsize if fp8 else self.head_dim * dtype.itemsize
        return 2 * self.num_kv_heads * block_size * row


def block_bytes(layers: Seq[LayerShape], block_size: int, dtype: torch.dtype, *, fp8: bool = False) -> int:
    """Return the bytes of one block over all layers, for a model of this dtype."""
    return sum(layer.block_bytes(block_size, dtype, fp8=fp8) for layer in layers)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer: two views of the same memory.

    In both views, all keys come before all values, and the rows of one head come before the rows of the next head.
    """

    shape: LayerShape
    blocks: Tensor  # (2 × kv_heads × num_blocks, block_size × head_dim)
    slots: Tensor  # (2 × kv_heads × num_slots, head_dim); the model's dtype, or codes of FP8 as uint8
    dtype: torch.dtype  # of the keys and values that are written and gathered
    scales: Tensor | None = None  # (2 × kv_heads × num_slots,), float32: those of FP8 rows; None: no FP8

    def write(self, key: Tensor, value: Tensor, index: Tensor) -> None:
        """Write `key` and `value`, (1, kv_heads, T, head_dim) each, to the slots of T tokens.

        `index` are the `HeadRows` of these slots.
        """
        rows = torch.cat((key, value)).view(-1, self.shape.head_dim)
        if self.scales is not None:
            rows, scales = to_fp8(rows)
            self.scales.index_copy_(0, index, scales)
        self.slots.index_copy_(0, index, rows)

    def gather(self, index: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of `num_seqs` sequences, (kv_heads × num_seqs, padded context, head_dim) each.

        `index` are the `HeadRows` of the block tables of the sequences.
        """
        gathered = self.blocks.index_select(0, index)
        if self.scales is not None:
            scales = self.scales.view(len(self.blocks), -1).index_select(0, index)
            gathered = from_fp8(gathered.view(*scales.shape, -1), scales, self.dtype)
        keys_values = gathered.view(2, self.shape.num_kv_heads * num_seqs, -1, self.shape.head_dim)
        return keys_values[0], keys_values[1]


class KVCache:
    """The keys and values of `num_blocks` blocks of `block_size` tokens, over all layers.

    `dtype` is the model's, and without `fp8` also that of the stored numbers. The constructor raises the error of the
    allocation if there is not enough memory.
    """

    def __init__(
        self,
        layers: Seq[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._pools: list[Tensor] = []
        by_layer: dict[int, LayerCache] = {}
        for shape in dict.fromkeys(layers):
            members = [i for i, layer in enumerate(layers) if layer == shape]
            size = (len(members), 2, shape.num_kv_heads, num_blocks, block_size)
            pool = _allocate((*size, shape.head_dim), torch.uint8 if fp8 else dtype, device)
            scales = _allocate(size, _SCALE, device) if fp8 else None
            self._pools += [pool] if scales is None else [pool, scales]
            for place, i in enumerate(members):
                by_layer[i] = LayerCache(
                    shape,
                    blocks=pool[place].view(-1, block_size * shape.head_dim),
                    slots=pool[place].view(-1, shape.head_dim),
                    dtype=dtype,
                    scales=None if scales is None else scales[place].view(-1),
                )
        self.layers = [by_layer[i] for i in range(len(layers))]

    def clear(self, blocks: Tensor) -> None:
        """Fill whole blocks with zeros, in all layers."""
        for pool in self._pools:
            pool.index_fill_(_BLOCK_DIM, blocks, 0)

    def read_blocks(self, blocks: Tensor) -> list[Tensor]:
        """Return copies of whole blocks: one tensor (len(blocks), …) for each pool."""
        return [pool.index_select(_BLOCK_DIM, blocks).movedim(_BLOCK_DIM, 0).contiguous() for pool in self._pools]

    def write_blocks(self, blocks: Tensor, contents: Seq[Tensor]) -> None:
        """Overwrite whole blocks with `contents`, which `read_blocks` has returned."""
        for pool, content in zip(self._pools, contents, strict=True):
            pool.index_copy_(_BLOCK_DIM, blocks, content.movedim(0, _BLOCK_DIM))


class HeadRows:
    """The rows of a `LayerCache` view that belong to the blocks or slots `ids`: rows of keys and values, of every head.

    `num_ids` is the number of all blocks or slots of the cache. The rows are made once for each number of KV heads.
    """

    def __init__(self, ids: Tensor, num_ids: int) -> None:
        self._ids = ids
        self._num_ids = num_ids
        self._rows: dict[int, Tensor] = {}

    def of(self, num_kv_heads: int) -> Tensor:
        """Return the rows in a layer with so many KV heads: (2 × kv_heads × number of ids,)."""
        if num_kv_heads not in self._rows:
            heads = torch.arange(2 * num_kv_heads, device=self._ids.device)
            self._rows[num_kv_heads] = (heads[:, None] * self._num_ids + self._ids.reshape(1, -1)).view(-1)
        return self._rows[num_kv_heads]


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (…, numbers), uint8, and the scales (…), float32, of `rows` (…, numbers).

    A row with a NaN has the scale NaN. The smallest scale is the smallest normal number, also that of a row of zeros.
    """
    numbers = rows.to(_SCALE)
    scales = (numbers.abs().amax(-1) / _FP8_MAX).clamp(min=torch.finfo(_SCALE).tiny)
    return (numbers / scales[..., None]).to(FP8).view(torch.uint8), scales


def from_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of `codes` (…, numbers), uint8, with `scales` (…)."""
    return (codes.view(FP8).to(_SCALE) * scales[..., None]).to(dtype)


def _allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros of this size.

    On a CPU the tensor is in anonymous memory, where pages that are never used are never committed.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(size) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(size)
