"""What reaches the SLA controller by itself while the core takes requests in and applies results."""

import pytest

from scheduler.control.controller import SLAController
from tests.scheduler.builders import make_request
from tests.scheduler.stepped_core import SteppedCore


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The arrivals that controllers were told of, without tiers that had none."""
    told: list[tuple[str, int]] = []

    def observe(controller: SLAController, tier: str, count: int) -> None:
        if count:
            told.append((tier, count))

    monkeypatch.setattr(SLAController, "observe_arrivals", observe)
    return told


def test_claimed_and_newly_queued_requests_have_arrived(arrivals: list[tuple[str, int]]) -> None:
    stepped = SteppedCore()
    stepped.accept(make_request("a"), make_request("b"), make_request("c", "bulk"))
    stepped.core.review({"realtime": 3, "bulk": 0, "batch": 0}, stepped.now)
    assert arrivals == [("realtime", 5), ("bulk", 1)]


def test_a_request_that_moves_from_the_queue_to_the_worker_arrives_once(arrivals: list[tuple[str, int]]) -> None:
    stepped = SteppedCore()
    stepped.core.review({"realtime": 2}, stepped.now)
    stepped.accept(make_request("a"), make_request("b"))
    stepped.core.review({"realtime": 0}, stepped.now)
    assert arrivals == [("realtime", 2)]


def test_a_queue_that_other_workers_empty_is_no_arrival(arrivals: list[tuple[str, int]]) -> None:
    stepped = SteppedCore()
    stepped.core.review({"bulk": 9}, stepped.now)
    stepped.core.review({"bulk": 4}, stepped.now)
    assert arrivals == [("bulk", 9)]


def test_latencies_and_ends_of_requests_are_observed() -> None:
    stepped = SteppedCore()
    stepped.accept(*(make_request(f"r{i}", max_tokens=30) for i in range(30)))
    stepped.run()
    output = stepped.core.status(stepped.now).outputs["realtime"]
    assert output.ttft_p99_s is not None and output.itl_p99_s is not None
    assert output.attainment == 1.0
