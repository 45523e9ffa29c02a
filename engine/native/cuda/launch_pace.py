"""Keep the host at most a few layers ahead of the device, so that decisions between layers still take effect.

Knows events of a stream; does not know layers or the decisions. Launching is faster than computing: without this limit,
a whole pass would be launched long before the device has computed half of the pass.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

_DEPTH = 3  # layers that the host may be ahead: enough that the device never waits for the host


class Event(Protocol):
    """The methods of torch's CUDA events that this module uses. Events are recorded on the current stream."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class LaunchPace:
    """A limit on the number of layers that the host launches ahead of the device, for one stream."""

    def __init__(self, make_event: Callable[[], Event] = torch.cuda.Event, depth: int = _DEPTH) -> None:
        self._make_event = make_event
        self._depth = depth
        self._events: deque[Event] = deque()

    def next_layer(self) -> None:
        """Wait until the device is at most `depth` layers behind the host. Call this before launching each layer."""
        event = self._make_event()
        event.record()
        self._events.append(event)
        if len(self._events) > self._depth:
            self._events.popleft().synchronize()
