"""Host memory that the device copies from while the host goes on, used in turns.

Knows integers and when their copies are done; not what they say. Pinning memory takes longer than the copy itself: a
few buffers are pinned once, and a buffer is written again only after its last copy.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.native.batch.packing import Ints

_DEPTH = 4
_MIN_BUFFER = 1 << 14  # numbers in a buffer


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PinnedRing:
    """For one device. `pin` and `make_event` are CUDA's unless a test says otherwise."""

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
        """`size` int64 numbers on the host, whose last copy is done. What they were is still there if it was as many;
        `mark_sent` has to follow their copy."""
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        if len(self._buffers[self._turn]) < size:
            room = max(_MIN_BUFFER, 1 << (size - 1).bit_length())
            self._buffers[self._turn] = torch.zeros(room, dtype=torch.int64, pin_memory=self._pin)
        return self._buffers[self._turn][:size]

    def mark_sent(self) -> None:
        """The copy of the buffer given out last is on its way."""
        event = self._events[self._turn]
        if event is None:
            event = self._events[self._turn] = self._make_event()
        event.record()

    def upload(self, arrays: Sequence[Ints]) -> Tensor:
        """The arrays end to end on the device, or on their way there."""
        buffer = self.next_buffer(sum(array.size for array in arrays))
        np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy())
        uploaded = torch.empty_like(buffer, device=self._device, pin_memory=False)
        uploaded.copy_(buffer, non_blocking=True)
        self.mark_sent()
        return uploaded
