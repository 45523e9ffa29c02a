"""A knob stays inside its bounds, and does not move where it is pinned."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.config import CountBounds
from scheduler.control.knobs import Knob

BOUNDS = CountBounds(min=2, start=8, max=64)


@given(st.lists(st.floats(-100, 1000, allow_nan=False)))
def test_a_knob_stays_inside_its_bounds_and_reports_every_move(targets: list[float]) -> None:
    knob = Knob("bulk", "batch_size", BOUNDS, pinned=None, dry_run=False)
    for target in targets:
        before = knob.value
        decision = knob.move(target, "signal", "reason")
        assert BOUNDS.min <= knob.value <= BOUNDS.max and knob.value == int(knob.value)
        assert (decision is None) == (knob.value == before)
        assert decision is None or (decision.old, decision.new, decision.acted) == (before, knob.value, True)


def test_a_pinned_knob_has_its_value_even_beyond_the_bounds() -> None:
    knob = Knob("bulk", "batch_size", BOUNDS, pinned=1, dry_run=False)
    assert knob.move(32, "signal", "reason") is None
    assert knob.value == 1
