"""The margins: widened by misses, narrowed by hits."""

import pytest

from scheduler.control.controller import SLAController
from tests.scheduler.builders import make_tiers
from tests.scheduler.control.builders import make_load, observe


def margins(controller: SLAController) -> dict[str, float]:
    found = controller.explain(0.0)["tiers"]["realtime"]["signals"]["margins"]
    assert isinstance(found, dict)
    return found


def test_misses_widen_the_margin_fast_and_hits_narrow_it_slowly() -> None:
    controller = SLAController(make_tiers(realtime={"slo": {"ttft_p99_ms": 500}}))
    observe(controller, "ttft", 600, count=2, bulk_ms=200)
    wide = margins(controller)["ttft"]
    observe(controller, "ttft", 100, count=100)
    assert margins(controller)["ttft"] == pytest.approx(wide / 2), "a hundred hits for a miss: the SLO is of the p99"


def test_first_tokens_that_less_bulk_would_not_have_made_quicker_move_no_margin() -> None:
    """Anti-windup: less bulk does not help against an overload of interactive traffic alone."""
    controller = SLAController(make_tiers())
    observe(controller, "ttft", 900, bulk_ms=100)
    assert margins(controller)["ttft"] == 0.0
    observe(controller, "ttft", 900, bulk_ms=500)
    assert margins(controller)["ttft"] > 0.0


def test_a_long_gap_widens_the_margin_whatever_made_it_long() -> None:
    controller = SLAController(make_tiers())
    before = margins(controller)["itl"]
    observe(controller, "itl", 150, count=1)
    assert margins(controller)["itl"] > before


@pytest.mark.parametrize(("gaps", "hits"), [(5, 1000), (40, 8000), (1000, 20_000)])
def test_as_many_gaps_may_miss_as_lets_one_request_in_a_hundred_break_its_slo(gaps: int, hits: int) -> None:
    """One long gap is forgotten after as many short ones as two hundred requests have, since the SLO has two targets.
    Of a thousand gaps, ten may be long."""
    controller = SLAController(make_tiers())
    for _ in range(500):
        controller.observe_end("realtime", met_slo=True, gaps=gaps, now=0.0)
    observe(controller, "itl", 20, count=4 * hits)  # whatever it starts with
    assert margins(controller)["itl"] == 0.0
    observe(controller, "itl", 150, count=1)
    observe(controller, "itl", 20, count=int(0.99 * hits))
    assert margins(controller)["itl"] > 0.0
    observe(controller, "itl", 20, count=int(0.02 * hits))
    assert margins(controller)["itl"] == 0.0


@pytest.mark.trap(8)
def test_the_margin_has_bounds_and_does_not_move_without_data() -> None:
    """Trap 8, and anti-windup."""
    controller = SLAController(make_tiers())
    observe(controller, "itl", 500, count=1000)
    widest = controller.outputs(0.0)["realtime"].margin
    assert 0.3 < widest < 1.0
    observe(controller, "itl", 500, count=1000)
    for now in range(1, 100):
        controller.update(make_load(), float(now))
    assert controller.outputs(100.0)["realtime"].margin == widest
    observe(controller, "itl", 10, count=50_000, now=100.0)
    assert controller.outputs(100.0)["realtime"].margin == 0.0
