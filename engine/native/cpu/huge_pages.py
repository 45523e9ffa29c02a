"""Memory of huge pages (2 MiB instead of 4 KiB), from which a processor reads weights faster.

A decode step reads all weights once, and looks up the address of each page on the way. Linux gives huge pages to memory
that asks for them, unless they are switched off. Knows memory and tensors; does not know layers.
"""

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

Keep = Callable[[Tensor], Tensor]  # returns a contiguous tensor with the same numbers, perhaps in other memory

REGION = 1 << 26  # bytes of memory taken at a time: many tensors are smaller than a page
_ALIGNMENT = 64  # bytes of a cache line, at which tensors begin


class HugePages:
    """Tensors one behind another in huge pages. A region of memory is free when none of its tensors lives."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._next = 0  # where the next tensor begins in the region

    def keep(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, which is on the CPU, as a contiguous tensor in a region."""
        first = -(-self._next // _ALIGNMENT) * _ALIGNMENT
        if first + tensor.nbytes > len(self._region):
            self._region, first = _new_region(max(tensor.nbytes, REGION)), 0
        self._next = first + tensor.nbytes
        kept = self._region[first : self._next].view(tensor.dtype).view(tensor.shape)
        return kept.copy_(tensor.detach())


def _new_region(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without huge pages, or another system than Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
