"""The host stays a fixed number of layers ahead, tested with events that record their calls."""

from engine.interface import Run, StepPlan
from engine.native.execution.model_runner import LaunchPace
from tests.engine.conftest import MakeEngine
from tests.engine.drive import make_new


class Stream:
    def __init__(self) -> None:
        self.num_recorded = 0
        self.waited_for: list[int] = []

    def make_event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._number = -1

    def record(self) -> None:
        self._number = self._stream.num_recorded
        self._stream.num_recorded += 1

    def synchronize(self) -> None:
        self._stream.waited_for.append(self._number)


def test_the_host_is_at_most_depth_layers_ahead() -> None:
    stream = Stream()
    pace = LaunchPace(stream.make_event, depth=2)
    waited = []
    for _ in range(6):
        pace.next_layer()
        waited.append(list(stream.waited_for))
    assert stream.num_recorded == 6
    assert waited == [[], [], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_every_layer_waits_for_its_pace_before_it_reads_eviction_requests(make_engine: MakeEngine) -> None:
    engine, stream = make_engine("gemma3"), Stream()
    engine._runner._pace = LaunchPace(stream.make_event, depth=1)
    new = make_new("s", range(3, 9))
    assert engine.step(StepPlan(0, start=(new,), run=(Run("s", 6),))).evicted == ()
    assert (stream.num_recorded, stream.waited_for) == (2, [0])
    engine.evict(1, {"s"})
    assert engine.step(StepPlan(1, run=(Run("s", 1),))).evicted == ("s",)
    assert (stream.num_recorded, stream.waited_for) == (3, [0, 1])
