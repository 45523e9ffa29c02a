"""Rejections: each says why, and when to try again; clients that are refused together are told different times."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.client import rejection
from scheduler.client.rejection import MAX_RETRY_S, MIN_RETRY_S, RejectReason, Returns
from scheduler.queue.base import QueueFull
from scheduler.registry.worker_status import TierStatus, WorkerStatus
from tests.scheduler.builders import make_tiers


def worker(worker_id: str, per_s: float, tier: str = "realtime") -> WorkerStatus:
    return WorkerStatus(worker_id, ("m",), 512, 1000, 0, tiers={tier: TierStatus(finished_per_s=per_s)})


TIERS = make_tiers(realtime={"queue_limit": 1000, "admission": {"predict": True}})
PATIENT = make_tiers(realtime={"admission": {"patience_ms": 10_000}})["realtime"]
TIER, BULK = TIERS["realtime"], TIERS["bulk"]
FULL = QueueFull("realtime", 1000, 1000)


LARGE = QueueFull("realtime", depth=20, limit=2**30, num_bytes=1000 * 2**20)
ALL_WORKERS = [worker("a", 4), worker("b", 6), worker("c", 99, "bulk")]


@pytest.mark.parametrize(
    ("rejected", "reason", "message", "retry_s"),
    [
        (
            rejection.queue_full(TIER, FULL, []),
            RejectReason.QUEUE_FULL,
            "The realtime tier's queue is full (1000 waiting, 1000 at most).",
            30,
        ),
        (
            rejection.queue_full(TIER, LARGE, [worker("a", 0.1)]),
            RejectReason.QUEUE_FULL,
            "The realtime tier's queue is full (1000 MB waiting, 1024 MB at most, in 20 requests).",
            10,
        ),
        (rejection.queue_full(TIER, FULL, ALL_WORKERS), RejectReason.QUEUE_FULL, "", 5),
        (
            rejection.overloaded(TIER, 4.4),
            RejectReason.OVERLOADED,
            "The realtime tier is overloaded: a first token would take about 4.4 s, and the SLO is 0.5 s.",
            4,
        ),
        (rejection.overloaded(TIER, 0.45), RejectReason.OVERLOADED, "0.45 s, and the tier opens again at 0.4 s.", 1),
        (
            rejection.too_late(BULK, predicted_s=90, left_s=30, own_s=5),
            RejectReason.DEADLINE,
            "The bulk tier cannot finish this by its deadline: it would take about 90 s, and 30 s are left.",
            60,
        ),
        (rejection.no_engine(), RejectReason.NO_ENGINE, "", 5),
        (rejection.draining(), RejectReason.DRAINING, "", 5),
    ],
)
def test_a_rejection_says_why_and_when_to_try_again(
    rejected: rejection.Rejected, reason: RejectReason, message: str, retry_s: float
) -> None:
    assert rejected.reason is reason and rejected.message.endswith(message) and not rejected.is_final
    assert rejected.retry_after_s == pytest.approx(retry_s) and rejected.advice == f"Try again in {retry_s} s."


def test_a_request_that_is_too_long_by_itself_is_refused_for_good() -> None:
    rejected = rejection.too_late(BULK, predicted_s=90, left_s=30, own_s=31)
    assert rejected.is_final and rejected.message.endswith("ask for a later deadline or fewer tokens.")
    assert rejected.advice == ""


@pytest.mark.parametrize("per_s", [0.0, 1e-9, 1.0, 1e9])
def test_the_wait_stays_where_clients_still_retry(per_s: float) -> None:
    assert MIN_RETRY_S <= rejection.queue_full(TIER, FULL, [worker("a", per_s)]).retry_after_s <= MAX_RETRY_S


@pytest.mark.parametrize(
    "rejected",
    [
        rejection.no_engine(),
        rejection.draining(),
        rejection.tier_gone("realtime"),
        rejection.overloaded(TIER, 1e6),
        rejection.overloaded(TIER, 0.0),
        rejection.too_late(BULK, 1e6, 5.0, 1.0),
    ],
)
def test_every_rejection_says_when_to_try_again(rejected: rejection.Rejected) -> None:
    assert MIN_RETRY_S <= rejected.retry_after_s <= MAX_RETRY_S
    assert rejected.advice == f"Try again in {rejected.retry_after_s:.0f} s."
    assert rejected.spread_s >= rejected.retry_after_s, "all of them may bring a crowd back"


@given(st.floats(0.5, 1e4), st.integers(2, 10**5), st.floats(1e-3, 1e4), st.integers(0, 2**32))
def test_a_crowd_that_is_refused_comes_back_spread_out(predicted_s: float, limit: int, per_s: float, seed: int) -> None:
    full = make_tiers(realtime={"queue_limit": limit})["realtime"]
    for told in (
        rejection.overloaded(PATIENT, predicted_s),
        rejection.too_late(BULK, 10 + predicted_s, left_s=10, own_s=1),
        rejection.queue_full(full, QueueFull("realtime", limit, limit), [worker("a", per_s)]),
        rejection.draining(),
    ):
        draw = random.Random(seed).random
        returns_s = sorted(told.at(draw()).retry_after_s for _ in range(100))
        assert told.retry_after_s / 2 <= returns_s[0] and returns_s[-1] <= MAX_RETRY_S
        window_s = max(MIN_RETRY_S, min(told.spread_s, MAX_RETRY_S / 2)) / 4
        crowd = max(sum(0 <= later - first < window_s for later in returns_s) for first in returns_s)
        assert crowd < 60, "not even in the busiest quarter do most of them come back"


def test_places_end_where_clients_would_give_up() -> None:
    returns, told = Returns(), rejection.overloaded(PATIENT, 20.0)
    waits_s = [returns.next_s("realtime", "", 0.0, told.retry_after_s, 1.0) for _ in range(300)]
    assert all(later - first == 1.0 for first, later in pairwise(waits_s) if later > first)
    assert max(waits_s) < MAX_RETRY_S and waits_s.count(told.retry_after_s) == 3, "then they begin anew"
    assert all(w <= told.in_place(w).at(share).retry_after_s <= w + 1 for w in waits_s[:100] for share in (0.0, 1.0))
