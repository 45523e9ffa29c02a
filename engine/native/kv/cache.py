"""The tensors that hold keys and values, in blocks. Knows layers, blocks and slots; not sequences.

Each layer shape has one pool, laid out (layer, K|V, kv_head, block, slot in block, head_dim). The head comes before the
block, so that gathering a batch's blocks gives (K|V, kv_head × sequence, context, head_dim): a batched matrix product
takes that without another copy. A block of one head is contiguous: gathering copies rows of block_size × head_dim
numbers. Keys and values lie in one tensor: a layer needs one gather and one scatter.
"""

import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_BLOCK_DIM = 3  # dimension of a pool that counts blocks


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one token's keys, and of its values, in one layer."""

    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return 2 * self.num_kv_heads * block_size * self.head_dim * dtype.itemsize


def block_bytes(layers: Seq[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers."""
    return sum(layer.block_bytes(block_size, dtype) for layer in layers)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer: two views of the same memory, keys before values, heads before blocks."""

    shape: LayerShape
    blocks: Tensor  # (2 × kv_heads × num_blocks, block_size × head_dim)
    slots: Tensor  # (2 × kv_heads × num_slots, head_dim)

    def write(self, key: Tensor, value: Tensor, index: Tensor) -> None:
        """Write key and value, (1, kv_heads, T, head_dim) each, to `index`: `head_rows` of the T tokens' slots."""
        rows = torch.cat((key, value)).view(-1, self.shape.head_dim)
        self.slots.index_copy_(0, index, rows)

    def gather(self, index: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, (kv_heads × num_seqs, padded context, head_dim) each, of `index`: `head_rows` of the
        sequences' block tables."""
        gathered = self.blocks.index_select(0, index)
        keys_values = gathered.view(2, self.shape.num_kv_heads * num_seqs, -1, self.shape.head_dim)
        return keys_values[0], keys_values[1]


class KVCache:
    """The KV of `num_blocks` blocks of `block_size` tokens, over all layers. Raises what the allocation raises."""

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
        """Fill whole blocks with zeros, in all layers."""
        for pool in self._pools:
            pool.index_fill_(_BLOCK_DIM, blocks, 0)

    def read_blocks(self, blocks: Tensor) -> list[Tensor]:
        """Return copies of whole blocks: for each pool one tensor (len(blocks), …)."""
        return [pool.index_select(_BLOCK_DIM, blocks).movedim(_BLOCK_DIM, 0).contiguous() for pool in self._pools]

    def write_blocks(self, blocks: Tensor, contents: Seq[Tensor]) -> None:
        """Overwrite whole blocks with what `read_blocks` returned."""
        for pool, content in zip(self._pools, contents, strict=True):
            pool.index_copy_(_BLOCK_DIM, blocks, content.movedim(0, _BLOCK_DIM))


def head_rows(ids: Tensor, num_kv_heads: int, num_ids: int) -> Tensor:
    """Return the rows of a `LayerCache` view that hold the blocks or slots `ids` of every head, keys and values:
    (2 × kv_heads × len(ids),). `num_ids` is the number of blocks or slots of the cache."""
    heads = torch.arange(2 * num_kv_heads, device=ids.device)
    return (heads[:, None] * num_ids + ids.reshape(1, -1)).view(-1)


def _allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor; on a CPU in anonymous memory, where pages that are never used are never committed."""
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(size) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(size)
