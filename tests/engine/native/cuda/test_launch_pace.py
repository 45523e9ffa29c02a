"""The host stays a fixed number of layers ahead of the device, with events that record their calls."""

from engine.interface import Run, StepPlan
from engine.native.execution.model_runner import LaunchPace
from tests.engine.conftest import MakeEngine
from tests.engine.drive import make_new


class Event:
    """The event of one layer, which notes its number in the lists of its class."""

    recorded: list["Event"]
    waited_for: list[int]

    def record(self) -> None:
        self.recorded.append(self)

    def synchronize(self) -> None:
        self.waited_for.append(self.recorded.index(self))


def test_every_layer_waits_for_its_pace_before_it_reads_eviction_requests(make_engine: MakeEngine) -> None:
    engine = make_engine("gemma3")
    Event.recorded, Event.waited_for = [], []
    engine._runner._pace = LaunchPace(Event, depth=1)
    new = make_new("s", range(3, 9))
    assert engine.step(StepPlan(0, start=(new,), run=(Run("s", 6),))).evicted == ()
    assert (len(Event.recorded), Event.waited_for) == (2, [0])
    engine.evict(1, {"s"})
    assert engine.step(StepPlan(1, run=(Run("s", 1),))).evicted == ("s",)
    assert (len(Event.recorded), Event.waited_for) == (3, [0, 1])
