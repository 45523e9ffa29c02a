"""Keeps the host a few layers ahead of the device and no more, so that what the host decides at a layer still matters.

Knows events of a stream; not layers or why. Launching is faster than computing: without it a pass is launched to its
end long before the device has done half of it.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

_DEPTH = 3  # layers: enough for the device never to run dry


class Event(Protocol):
    """Of the current stream, as torch has it."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class LaunchPace:
    def __init__(self, make_event: Callable[[], Event] = torch.cuda.Event, depth: int = _DEPTH) -> None:
        self._make_event = make_event
        self._depth = depth
        self._events: deque[Event] = deque()

    def next_layer(self) -> None:
        """Waits until the device is at most `depth` layers behind; to be called before each is launched."""
        event = self._make_event()
        event.record()
        self._events.append(event)
        if len(self._events) > self._depth:
            self._events.popleft().synchronize()
