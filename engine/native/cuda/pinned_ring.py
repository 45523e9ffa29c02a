"""A ring of pinned host buffers, from which the device copies integers while the host continues.

Knows integers and when their copies are complete; does not know what they mean. Pinning memory takes longer than the
copy itself, so a few buffers are pinned once, and a buffer is reused only after its last copy is complete.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.native.batch.packing import Ints

_DEPTH = 4  # buffers
_MIN_BUFFER = 1 << 14  # int64 numbers in the smallest buffer


class Event(Protocol):
    """The methods of torch's CUDA events that this module uses. Events are recorded on the current stream."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PinnedRing:
    """A ring of `depth` host buffers for one device.

    Tests without CUDA set `pin` to False and pass their own `make_event`.
    """

    def __init__(
        self,
        device: torch.device,
        depth: int = _DEPTH,
        *,
        pin: bool = True,
        make_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        self._device = device
        self._pin = pin
        self._make_event = make_event
        self._buffers = [torch.empty(0, dtype=torch.int64)] * depth
        self._events: list[Event | None] = [None] * depth
        self._turn = 0

    def next_buffer(self, size: int) -> Tensor:
        """Wait until the last copy from the next host buffer is complete; return the buffer, (size,) int64.

        The buffer holds its former numbers, or zeros if it had to be enlarged. After starting the copy to the device,
        call `mark_sent`.
        """
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        if len(self._buffers[self._turn]) < size:
            room = max(_MIN_BUFFER, 1 << (size - 1).bit_length())
            self._buffers[self._turn] = torch.zeros(room, dtype=torch.int64, pin_memory=self._pin)
        return self._buffers[self._turn][:size]

    def mark_sent(self) -> None:
        """Record that the copy from the buffer that `next_buffer` returned last has been started."""
        event = self._events[self._turn]
        if event is None:
            event = self._events[self._turn] = self._make_event()
        event.record()

    def upload(self, arrays: Sequence[Ints]) -> Tensor:
        """Return the concatenated arrays, (sum of sizes,) int64, on the device; the copy may still be running."""
        buffer = self.next_buffer(sum(array.size for array in arrays))
        np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy())
        uploaded = torch.empty_like(buffer, device=self._device, pin_memory=False)
        uploaded.copy_(buffer, non_blocking=True)
        self.mark_sent()
        return uploaded
