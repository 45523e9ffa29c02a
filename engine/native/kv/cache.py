"""The tensors that hold keys and values, in blocks. Knows layers, blocks and slots; not sequences.

One pool a layer shape, laid out (layer, K|V, kv_head, block, slot in block, head_dim). Heads are outside of
blocks, so that gathering a batch's blocks gives (K|V, kv_head × sequence, context, head_dim): what a batched
matrix product takes, without another copy. A block of one head is contiguous: gathering copies rows of
block_size × head_dim numbers. Keys and values lie in one tensor: one gather and one scatter a layer.
"""

import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_BLOCK_DIM = 3  # of a pool


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return 2 * self.num_kv_heads * block_size * self.head_dim * dtype.itemsize


def block_bytes(layers: Seq[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(layer.block_bytes(block_size, dtype) for layer in layers)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's two views of the same memory, K before V, heads before blocks:
    `blocks` (2 × kv_heads × num_blocks, block_size × head_dim) and `slots` (2 × kv_heads × num_slots, head_dim).
    """

    shape: LayerShape
    blocks: Tensor
    slots: Tensor

    def write(self, key: Tensor, value: Tensor, index: Tensor) -> None:
        """Scatter key and value, (1, kv_heads, T, head_dim) each, to `head_rows(slots of the T tokens)`."""
        rows = torch.cat((key, value)).view(-1, self.shape.head_dim)
        self.slots.index_copy_(0, index, rows)

    def gather(self, index: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `head_rows(block tables)`: (kv_heads × num_seqs, padded context, head_dim) each."""
        gathered = self.blocks.index_select(0, index)
        keys_values = gathered.view(2, self.shape.num_kv_heads * num_seqs, -1, self.shape.head_dim)
        return keys_values[0], keys_values[1]


class KVCache:
    def __init__(
        self,
        layers: Seq[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._pools: list[Tensor] = []
        by_layer: dict[int, LayerCache] = {}
        for shape in dict.fromkeys(layers):
            members = [i for i, layer in enumerate(layers) if layer == shape]
            size = (len(members), 2, shape.num_kv_heads, num_blocks, block_size, shape.head_dim)
            pool = _allocate(size, dtype, device)
            self._pools.append(pool)
            for i, tensor in zip(members, pool, strict=True):
                by_layer[i] = LayerCache(
                    shape,
                    blocks=tensor.view(-1, block_size * shape.head_dim),
                    slots=tensor.view(-1, shape.head_dim),
                )
        self.layers = [by_layer[i] for i in range(len(layers))]

    def clear(self, blocks: Tensor) -> None:
        """Zero whole blocks, in all layers."""
        for pool in self._pools:
            pool.index_fill_(_BLOCK_DIM, blocks, 0)

    def read_blocks(self, blocks: Tensor) -> list[Tensor]:
        """Copies of whole blocks, a tensor (len(blocks), …) for each pool."""
        return [pool.index_select(_BLOCK_DIM, blocks).movedim(_BLOCK_DIM, 0).contiguous() for pool in self._pools]

    def write_blocks(self, blocks: Tensor, contents: Seq[Tensor]) -> None:
        """Overwrite whole blocks with what `read_blocks` gave."""
        for pool, content in zip(self._pools, contents, strict=True):
            pool.index_copy_(_BLOCK_DIM, blocks, content.movedim(0, _BLOCK_DIM))


def head_rows(ids: Tensor, num_kv_heads: int, num_ids: int) -> Tensor:
    """Where the blocks or slots `ids` of every head lie in a `LayerCache` view: (2 × kv_heads × len(ids),)."""
    heads = torch.arange(2 * num_kv_heads, device=ids.device)
    return (heads[:, None] * num_ids + ids.reshape(1, -1)).view(-1)


def _allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU anonymous memory, page-aligned: what no block ever uses is never committed."""
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(size) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(size)
