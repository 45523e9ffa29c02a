"""The swap space: host memory for the KV of swapped sequences, and copies of blocks to it and back.

Knows block numbers and the KV cache; does not know sequences, or which host blocks are free (`SequenceTable`). On CUDA
the memory is pinned, and copies are queued on the computing stream in the order of the calls. So a block is copied out
before its next holder writes to it, and is copied back before a step reads it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor

from engine.config import EngineConfig, EngineStartError
from engine.native.device import free_bytes
from engine.native.kv.cache import KVCache
from engine.sequences.sequence_table import BlockCopies

_CUDA_BYTES = 4 << 30  # bytes; the default size on CUDA
_HOST_SHARE = 0.25  # the default size is at most this share of the free host memory
_GROUP = 64  # maximum number of blocks in one copy; it limits the device memory that the copy needs
_MEASURED = 16  # number of blocks that are copied to measure the time

Pair = tuple[int, int]  # as in `BlockCopies`


def make_swap_space(config: EngineConfig, cache: KVCache, block_bytes: int, device: torch.device) -> "SwapSpace | None":
    """Return a swap space of the configured size; None if the size is less than one block.

    By default, a GPU gets a share of the host memory. A CPU gets no swap space, since its KV is in host memory already.
    Raises `EngineStartError` if the configured size is more than the free host memory.
    """
    free = free_bytes(torch.device("cpu"))
    wanted = config.swap_bytes
    if wanted is None:
        wanted = min(_CUDA_BYTES, int(_HOST_SHARE * free)) if device.type == "cuda" else 0
    elif wanted > free:
        raise EngineStartError(f"swap_bytes is {wanted} and the host has {free} bytes free")
    num_blocks = wanted // block_bytes
    return SwapSpace(cache, num_blocks, device) if num_blocks else None


class SwapSpace:
    """A swap space of `num_blocks` blocks of host memory.

    It has one tensor (num_blocks, shape of a block …) for each pool of the KV cache.
    """

    def __init__(self, cache: KVCache, num_blocks: int, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self.num_blocks = num_blocks
        blocks, pins = cache.read_blocks(self._ids([0])), device.type == "cuda"
        try:
            self._host = [torch.empty((num_blocks, *b.shape[1:]), dtype=b.dtype, pin_memory=pins) for b in blocks]
        except RuntimeError as error:
            raise EngineStartError(f"not enough host memory to swap {num_blocks} KV blocks") from error

    def copy(self, copies: BlockCopies) -> None:
        """Copy the blocks `copies.out` from device to host, then the blocks `copies.back` from host to device."""
        for group in _groups(copies.out):
            self._copy_out([device for device, _ in group], [host for _, host in group])
        for group in _groups(copies.back):
            self._copy_back([host for host, _ in group], [device for _, device in group])

    def measure(self) -> float:
        """Return the measured seconds to copy one block, to the host or back. Call this while the cache is unused."""
        count = min(_MEASURED, self.num_blocks, self._cache.num_blocks)
        copies = BlockCopies(out=[(i, i) for i in range(count)], back=[(i, i) for i in range(count)])
        self.copy(copies)  # not measured, because the first copy includes work that is done once
        self._synchronize()
        started = perf_counter()
        self.copy(copies)
        self._synchronize()
        return (perf_counter() - started) / (2 * count)

    def _copy_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for host, blocks in zip(self._host, self._cache.read_blocks(self._ids(device_blocks)), strict=True):
            for start, end in _consecutive(host_blocks):
                first = host_blocks[start]
                host[first : first + end - start].copy_(blocks[start:end], non_blocking=True)

    def _copy_back(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        contents: list[Tensor] = []
        for host in self._host:
            blocks = torch.empty((len(host_blocks), *host.shape[1:]), dtype=host.dtype, device=self._device)
            for start, end in _consecutive(host_blocks):
                first = host_blocks[start]
                blocks[start:end].copy_(host[first : first + end - start], non_blocking=True)
            contents.append(blocks)
        self._cache.write_blocks(self._ids(device_blocks), contents)

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _groups(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    return (pairs[i : i + _GROUP] for i in range(0, len(pairs), _GROUP))


def _consecutive(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the slices (start, end) of `blocks` in which the block numbers are consecutive.

    Each slice is copied as a whole.
    """
    cuts = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    return pairwise((0, *cuts, len(blocks)))
