"""Refusals: each says why, and when to come back."""

import pytest

from scheduler import admission
from scheduler.admission import MAX_RETRY_S, MIN_RETRY_S, RejectReason
from scheduler.request import TierStatus, WorkerStatus
from tests.scheduler.builders import make_tiers


def worker(worker_id: str, per_s: float, tier: str = "realtime") -> WorkerStatus:
    return WorkerStatus(worker_id, ("m",), 512, 1000, 0, tiers={tier: TierStatus(finished_per_s=per_s)})


TIER = make_tiers(realtime={"queue_limit": 1000})["realtime"]


def test_a_full_queue_names_the_tier_and_its_limit() -> None:
    rejected = admission.queue_full(TIER, 1000, [])
    assert rejected.reason is RejectReason.QUEUE_FULL
    assert rejected.message == "The realtime tier's queue is full (1000 waiting, 1000 at most)."


def test_the_wait_is_the_time_that_makes_a_little_room_at_the_rate_of_all_workers() -> None:
    assert (
        admission.queue_full(TIER, 1000, [worker("a", 4), worker("b", 6), worker("c", 99, "bulk")]).retry_after_s == 5
    )


@pytest.mark.parametrize("per_s", [0.0, 1e-9, 1.0, 1e9])
def test_the_wait_stays_where_clients_still_retry(per_s: float) -> None:
    assert MIN_RETRY_S <= admission.queue_full(TIER, 1000, [worker("a", per_s)]).retry_after_s <= MAX_RETRY_S


def test_no_engine_and_draining() -> None:
    assert admission.no_engine().reason is RejectReason.NO_ENGINE
    assert admission.draining().reason is RejectReason.DRAINING
    for rejected in (admission.no_engine(), admission.draining()):
        assert MIN_RETRY_S <= rejected.retry_after_s <= MAX_RETRY_S and rejected.message.endswith(".")
