"""Host buffers are used in turn, and none is written before its last copy is complete."""

import numpy as np
import torch

from engine.native.cuda.pinned_ring import PinnedRing

CPU = torch.device("cpu")


class NotedEvent:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_arrays_arrive_concatenated() -> None:
    ring = PinnedRing(CPU, pin=False, make_event=NotedEvent)
    arrays = [np.arange(3), np.arange(6).reshape(2, 3), np.array([], dtype=np.int64)]
    first = ring.upload(arrays)
    second = ring.upload([np.array([9])])
    assert first.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert second.tolist() == [9]


def test_a_buffer_waits_for_its_own_last_copy() -> None:
    events: list[NotedEvent] = []

    def make() -> NotedEvent:
        events.append(NotedEvent())
        return events[-1]

    ring = PinnedRing(CPU, depth=2, pin=False, make_event=make)
    for _ in range(5):
        ring.upload([np.array([1])])
    assert [event.calls for event in events] == [
        ["record", "synchronize", "record", "synchronize", "record"],
        ["record", "synchronize", "record"],
    ]


def test_buffers_grow_and_are_reused() -> None:
    ring = PinnedRing(CPU, depth=1, pin=False, make_event=NotedEvent)
    large = 100_000
    kept = ring.next_buffer(large)
    assert len(kept) == large
    ring.mark_sent()
    assert ring.next_buffer(10).data_ptr() == kept.data_ptr()
    ring.mark_sent()
    assert ring.next_buffer(large).data_ptr() == kept.data_ptr()
