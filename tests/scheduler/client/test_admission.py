"""Admission: which requests are refused, when a tier closes and opens again, and what is never looked at."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.client.admission import Admission, Ticket
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.client.ttft_forecast import Forecast
from scheduler.config import TierSet
from scheduler.queue.base import Backlog, QueueFull, TooFarBehind
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus
from scheduler.request import EventKind, Request, TokenEvent
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import make_request, make_tiers

IDLE = TierCapacity(step_s=0.0, slots_free=8, drain_per_s=2.0, prefill_tokens_per_s=1000.0, output_tokens_per_s=1000.0)


def tiers(**more: Any) -> TierSet:
    """Return tiers in which `realtime` has the strict form of admission: its limit is the SLO of 0.5 s."""
    return make_tiers(realtime={"admission": {"predict": True}, **more})


def make_admission(tiers: TierSet, realtime: TierCapacity | None = IDLE, bulk: TierCapacity | None = IDLE) -> Admission:
    admission = Admission(tiers)
    statuses = {
        "realtime": TierStatus(batch_size=8, finished_per_s=0.5, capacity=realtime),
        "bulk": TierStatus(batch_size=8, capacity=bulk),
    }
    heartbeat(admission, statuses, second=0)
    return admission


def heartbeat(
    admission: Admission, statuses: dict[str, TierStatus], second: int, backlogs: dict[str, Backlog] | None = None
) -> None:
    status = WorkerStatus("w", ("m",), 512, 1000, 0, tiers=statuses, at_ms=1000 * second)
    admission.on_heartbeat([status], backlogs or {}, now=second, wall_ms=1000 * second)


def submit(
    admission: Admission, *requests: Request, ahead: Backlog | None = None, now: float = 0.0
) -> Ticket | Rejected:
    """Do what the client does, with `ahead` waiting in the queue."""
    ticket = admission.begin(requests, now, EPOCH_MS)
    if isinstance(ticket, Rejected):
        return ticket
    is_behind = ticket.ahead is not None and not ticket.ahead.admits(ahead or Backlog())
    reply = TooFarBehind(ticket.tier.name, ahead or Backlog()) if is_behind else None
    return admission.settle(ticket, reply) or ticket


def attempt(
    admission: Admission, *requests: Request, ahead: Backlog | None = None, now: float = 0.0
) -> Rejected | None:
    """Submit `requests` and, if they are admitted, end them at once."""
    outcome = submit(admission, *requests, ahead=ahead, now=now)
    for request in requests:
        admission.forget(request.id)
    return outcome if isinstance(outcome, Rejected) else None


def forecast_of(admission: Admission, now: float = 0.0) -> Forecast:
    """Return the forecast for a request of the realtime tier."""
    request = make_request("probe")
    ticket = admission.begin([request], now, EPOCH_MS)
    admission.forget(request.id)
    assert isinstance(ticket, Ticket) and ticket.forecast is not None
    return ticket.forecast


def test_a_first_token_that_would_be_late_is_refused() -> None:
    admission = make_admission(tiers())
    assert attempt(admission, make_request("a", prompt=50), ahead=Backlog(1, 440)) is None
    rejected = attempt(admission, make_request("b", prompt=50), ahead=Backlog(1, 700))
    assert rejected is not None and rejected.reason is RejectReason.OVERLOADED
    assert "0.75 s" in rejected.message


@pytest.mark.parametrize(
    ("keys", "limit_s", "rule"),
    [({"predict": True}, 0.5, "the SLO is 0.5 s"), ({}, 10.0, "the patience is 10 s")],
)
def test_a_tier_closes_at_its_limit_and_opens_again_at_a_part_of_it(
    keys: dict[str, bool], limit_s: float, rule: str
) -> None:
    admission, request = make_admission(make_tiers(realtime={"admission": keys})), make_request("a", prompt=0)

    def refused(share: float) -> Rejected | None:
        return attempt(admission, request, ahead=Backlog(1, int(1000 * share * limit_s)))

    assert refused(0.98) is None
    rejected = refused(1.4)
    assert rejected is not None and rejected.reason is RejectReason.OVERLOADED and rule in rejected.message
    assert rejected.retry_after_s == pytest.approx(max(1.0, 0.6 * limit_s), abs=0.1), "until the tier opens again"
    assert admission.is_closed("realtime") and refused(0.9) is not None
    assert refused(0.78) is None and not admission.is_closed("realtime")
    assert refused(0.9) is None


def test_a_herd_comes_back_at_the_rate_at_which_requests_end() -> None:
    """The requests of the tier end at 4 a second."""
    patient = make_tiers(realtime={"admission": {}})
    admission = make_admission(patient, realtime=replace(IDLE, drain_per_s=4.0))
    told = [attempt(admission, make_request(str(n), prompt=0), ahead=Backlog(1, 14_000)) for n in range(20)]
    waits_s = [rejected.retry_after_s for rejected in told if rejected is not None]
    assert len(waits_s) == 20
    assert waits_s == pytest.approx([waits_s[0] + n / 4 for n in range(20)])


def test_prompts_that_are_late_by_themselves_are_ahead_of_nobody() -> None:
    """Workers let others pass them. Many short prompts are ahead, though the last of them will be late."""
    patient = make_tiers(realtime={"admission": {}})
    admission = make_admission(patient)
    assert isinstance(submit(admission, make_request("long", prompt=4000)), Ticket)
    assert admission.predicted_ttft_s(patient["realtime"], {}, 0.0) == pytest.approx(0.0)
    for n in range(10):
        assert isinstance(submit(admission, make_request(f"short-{n}", prompt=400)), Ticket)
    assert admission.predicted_ttft_s(patient["realtime"], {}, 0.0) == pytest.approx(4.0)


def test_refused_requests_are_not_in_flight() -> None:
    admission = make_admission(tiers())
    for n in range(50):
        ticket = admission.begin([make_request(f"r{n}", prompt=400)], 0.0, EPOCH_MS)
        assert isinstance(ticket, Ticket)
        rejected = admission.settle(ticket, QueueFull("realtime", depth=9, limit=9))
        assert rejected is not None and rejected.reason is RejectReason.QUEUE_FULL
        assert rejected.retry_after_s > 1, "from the drain rate of the workers"
    assert not admission.is_closed("realtime"), "a full queue says nothing about the SLO"


@pytest.mark.trap(4)
def test_trap_4_a_burst_is_counted_before_the_heartbeats_know_of_it() -> None:
    """All of the burst has left the queue at once, and the last heartbeat says that workers hold nothing."""
    admission = make_admission(tiers())
    outcomes = [submit(admission, make_request(f"r{n}", prompt=100)) for n in range(50)]
    assert sum(isinstance(o, Ticket) for o in outcomes) == 5, "0.5 s at 1000 tokens a second"
    assert attempt(admission, make_request("next", prompt=1)) is not None
    admission.on_event(TokenEvent("r0", EventKind.TOKENS, 0, (1,)), now=0.1)
    assert attempt(admission, make_request("next", prompt=1)) is not None, "closed at 0.5 s, open again at 0.4 s"
    admission.forget("r1")
    assert attempt(admission, make_request("next", prompt=1)) is None


@pytest.mark.trap(7)
def test_trap_7_what_closes_bulk_does_not_close_what_is_above() -> None:
    saturated = replace(IDLE, prompt_tokens=10**6, output_tokens=10**6, slots_free=-100)
    admission = make_admission(tiers(), bulk=saturated)
    submit(admission, *(make_request(f"b{n}", "bulk", prompt=500, deadline_ms=2**50) for n in range(100)))
    bulk = make_request("b", "bulk", deadline_ms=EPOCH_MS + 600_000)
    rejected = attempt(admission, bulk)
    assert rejected is not None and rejected.reason is RejectReason.DEADLINE
    assert attempt(admission, make_request("r", prompt=100)) is None


@pytest.mark.trap(7)
def test_trap_7_only_tiers_of_higher_priority_are_ahead() -> None:
    admission = make_admission(tiers())
    for tier, above in {"realtime": (), "bulk": ("realtime",)}.items():
        ticket = admission.begin([make_request(tier, tier, deadline_ms=2**50)], 0.0, EPOCH_MS)
        assert isinstance(ticket, Ticket) and ticket.ahead is not None and ticket.ahead.above == above


@pytest.mark.trap(8)
@pytest.mark.parametrize("unknown", ["nothing", "stale", "endless patience"])
def test_trap_8_without_a_prediction_nothing_is_refused(unknown: str) -> None:
    known = tiers(admission={"patience_ms": None}) if unknown == "endless patience" else tiers()
    admission = make_admission(known, realtime=None if unknown == "nothing" else IDLE)
    now = 60.0 if unknown == "stale" else 0.0
    assert attempt(admission, make_request("a", prompt=10**5), ahead=Backlog(10**5, 10**8), now=now) is None


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    admission = make_admission(tiers())
    request = make_request("b", "bulk", prompt=100, deadline_ms=EPOCH_MS + 2000)
    assert attempt(admission, request, ahead=Backlog(5, 1800)) is None
    rejected = attempt(admission, request, ahead=Backlog(5, 2300))
    assert rejected is not None and rejected.reason is RejectReason.DEADLINE
    assert not admission.is_closed("bulk"), "a later deadline may still be met"


def test_with_a_deadline_of_its_own_the_steps_are_as_short_as_a_request_needs() -> None:
    """Steps of what runs in the tier take 0.5 s, those of the tiers above 0.01 s, and answers have 50 of 100 tokens."""
    admission = make_admission(tiers(), bulk=replace(IDLE, step_s=0.5, output_tokens_per_s=1000.0))
    first = make_request("first", "bulk", deadline_ms=2**50, max_tokens=100)
    submit(admission, first)
    admission.on_event(TokenEvent("first", EventKind.FINISHED, 0, (1,) * 50), now=0.0)
    sooner = make_request("sooner", "bulk", max_tokens=100, deadline_ms=EPOCH_MS + 2000)
    assert attempt(admission, sooner) is None


def test_a_part_of_a_job_is_not_refused_for_its_deadline() -> None:
    """The job was admitted as a whole. If it is late, it needs each of its parts all the more."""
    late = make_request("b", "bulk", prompt=100, deadline_ms=EPOCH_MS + 10, urgent_ms=1000)
    assert attempt(make_admission(tiers()), late, ahead=Backlog(5, 10_000)) is None


def test_waits_that_turn_out_longer_are_predicted_longer() -> None:
    admission = make_admission(tiers())
    before = forecast_of(admission).prompt_token_s
    for n in range(60):
        heartbeat(admission, {"realtime": TierStatus(batch_size=8, capacity=IDLE)}, second=n)
        submit(admission, make_request(f"a{n}", prompt=200), now=n)
        submit(admission, make_request(f"b{n}", prompt=1), now=n)
        admission.on_event(TokenEvent(f"a{n}", EventKind.FINISHED, 0, (1,)), n + 0.2)
        admission.on_event(TokenEvent(f"b{n}", EventKind.FINISHED, 0, (1,)), n + 0.6)
    assert forecast_of(admission, now=60).prompt_token_s > 2 * before


def test_predicted_ttft_is_that_of_a_short_request_that_arrives_now() -> None:
    known = tiers()
    admission = make_admission(known, realtime=replace(IDLE, step_s=0.01, prompt_tokens=100))
    backlogs = {"realtime": Backlog(2, 300, 50), "bulk": Backlog(9, 9000, 9000)}
    assert admission.predicted_ttft_s(known["realtime"], backlogs, 0.0) == pytest.approx(0.01 + 0.1 + 0.3)
    assert admission.predicted_ttft_s(known["bulk"], backlogs, 0.0) is None
    assert admission.predicted_ttft_s(known["realtime"], backlogs, 60.0) is None


def of_key(owner: str, name: str, prompt: int = 100, tier: str = "realtime", **more: Any) -> Request:
    return make_request(f"{owner}-{name}", tier, prompt, owner=owner, **more)


def test_a_key_that_floods_is_told_to_wait_and_others_are_not() -> None:
    admission = make_admission(tiers())
    outcomes = [submit(admission, of_key("a", str(n), 70)) for n in range(12)]
    rejected = [outcome for outcome in outcomes if isinstance(outcome, Rejected)]
    assert {r.reason for r in rejected} == {RejectReason.KEY_LIMIT}
    assert "which has 7 open" in rejected[0].message and rejected[-1].retry_after_s > rejected[0].retry_after_s
    assert not admission.is_closed("realtime")
    assert attempt(admission, of_key("b", "0")) is None


def test_others_do_not_come_back_behind_a_flood() -> None:
    admission = make_admission(tiers())
    for n in range(40):
        submit(admission, of_key("a", str(n), 70))
    long = attempt(admission, of_key("b", "long", 450))
    assert long is not None and long.reason is RejectReason.OVERLOADED and long.retry_after_s < 2
    flood = attempt(admission, of_key("a", "next", 70))
    assert flood is not None and flood.retry_after_s > 10


def test_where_everybody_would_wait_no_key_is_blamed() -> None:
    admission = make_admission(tiers())
    assert isinstance(submit(admission, of_key("a", "0", 450)), Ticket)
    for n in range(8):
        submit(admission, of_key("a", str(n), 100))
    outcome = attempt(admission, of_key("b", "0", 200))
    assert outcome is not None and outcome.reason is RejectReason.OVERLOADED
    assert admission.is_closed("realtime")


def test_a_queue_full_of_one_keys_requests_is_that_keys_limit() -> None:
    """Where keys are not told apart, the queue is full for everybody."""
    for owner, reason in (("a", RejectReason.KEY_LIMIT), ("", RejectReason.QUEUE_FULL)):
        admission = make_admission(make_tiers(realtime={"admission": {"patience_ms": None}}))
        for n in range(9):
            assert isinstance(submit(admission, of_key(owner, str(n), 1)), Ticket)
        ticket = admission.begin([of_key(owner, "next", 1)], 0.0, EPOCH_MS)
        assert isinstance(ticket, Ticket)
        rejected = admission.settle(ticket, QueueFull("realtime", depth=9, limit=9))
        assert rejected is not None and rejected.reason is reason


def place_bulk(admission: Admission, *requests: Request) -> list[int]:
    """Return the scores of requests of the bulk tier, minus the deadline of one that arrives at `EPOCH_MS`."""
    ticket = admission.begin(requests, 0.0, EPOCH_MS)
    assert isinstance(ticket, Ticket)
    return [request.score_ms - EPOCH_MS - ticket.tier.deadline_ms for request in ticket.requests]


def test_a_few_bulk_requests_of_a_key_go_before_what_others_have_put() -> None:
    tiers = make_tiers()
    admission, deadline_ms = make_admission(tiers), tiers.tiers["bulk"].deadline_ms
    line = of_key("b", "line", tier="bulk", job_part="line", deadline_ms=EPOCH_MS + deadline_ms)
    flood = [
        score
        for number in range(20)
        for score in place_bulk(admission, of_key("a", str(number), tier="bulk", deadline_ms=EPOCH_MS + deadline_ms))
    ]
    assert flood == sorted(set(flood)) and flood[0] == 0
    assert place_bulk(admission, line) == [0], "batches have shares of their own"
    few = [place_bulk(admission, of_key("b", str(number), tier="bulk"))[0] for number in range(3)]
    assert few == [-deadline_ms] * 3


def test_two_bulk_floods_take_turns_and_a_deadline_of_its_own_brings_a_request_forward() -> None:
    tiers = make_tiers()
    admission, due_ms = make_admission(tiers), EPOCH_MS + tiers.tiers["bulk"].deadline_ms
    flood = place_bulk(admission, *(of_key("a", str(n), tier="bulk", deadline_ms=due_ms) for n in range(20)))
    others = place_bulk(admission, *(of_key("b", str(n), tier="bulk", deadline_ms=due_ms) for n in range(20)))
    assert flood == others
    sooner = of_key("b", "sooner", tier="bulk", deadline_ms=due_ms - 3000)
    assert place_bulk(admission, sooner)[0] == -3000, "before what waits of its key"


def test_whenever_nothing_waits_places_in_a_bulk_tier_begin_with_the_present_deadline() -> None:
    admission = make_admission(make_tiers())
    flood = place_bulk(admission, *(of_key("a", str(n), tier="bulk") for n in range(20)))
    for waiting, begins_anew in ((Backlog(3, 300), False), (Backlog(), True)):
        heartbeat(admission, {}, second=5, backlogs={"bulk": waiting})
        [score] = place_bulk(admission, of_key("a", f"after {waiting.requests}", tier="bulk"))
        wanted = 5000 - EPOCH_MS + flood[0] if begins_anew else 2 * flood[-1] - flood[-2]
        assert score == wanted


def test_a_later_bulk_flood_begins_where_the_one_before_it_runs() -> None:
    admission = make_admission(make_tiers())
    flood = place_bulk(admission, *(of_key("a", str(n), tier="bulk") for n in range(20)))
    for number in range(10):
        admission.on_event(TokenEvent(f"a-{number}", EventKind.TOKENS, 0, (5,)), 0.0)
    assert place_bulk(admission, *(of_key("b", str(n), tier="bulk") for n in range(10)))[0] == flood[9]


def test_bulk_that_was_refused_or_cancelled_in_the_queue_costs_its_key_no_turn() -> None:
    admission, bulk = make_admission(make_tiers()), {"tier": "bulk", "deadline_ms": 2**50}
    first = place_bulk(admission, of_key("a", "first", **bulk))
    for number in range(5):
        place_bulk(admission, of_key("a", str(number), **bulk))
        admission.forget(f"a-{number}")
    assert place_bulk(admission, of_key("a", "next", **bulk))[0] == first[0] + 108, "its prompt and output tokens"


def test_a_bulk_queue_that_another_key_has_filled_takes_a_few_all_the_same() -> None:
    admission = make_admission(make_tiers())
    for number in range(9):
        assert isinstance(submit(admission, of_key("a", str(number), tier="bulk")), Ticket)
    for owner, has_few in (("a", False), ("b", True)):
        ticket = admission.begin([of_key(owner, "next", tier="bulk")], 0.0, EPOCH_MS)
        assert isinstance(ticket, Ticket) and ticket.has_few is has_few


def test_a_few_bulk_requests_of_a_key_wait_for_what_workers_hold() -> None:
    """A worker makes room for interactive requests of a key that has few, not for bulk."""
    tiers = make_tiers()
    admission, due_ms = make_admission(tiers), EPOCH_MS + tiers.tiers["bulk"].deadline_ms
    for number in range(9):
        assert isinstance(submit(admission, of_key("a", str(number), tier="bulk")), Ticket)
    heartbeat(admission, {"bulk": TierStatus(batch_size=8, capacity=replace(IDLE, prompt_tokens=10**9))}, second=1)
    late = attempt(admission, of_key("b", "next", tier="bulk", deadline_ms=due_ms), now=1.0)
    assert late is not None and late.reason is RejectReason.DEADLINE


def test_further_requests_of_a_key_are_placed_by_its_weight() -> None:
    admission = make_admission(make_tiers(realtime={"admission": {"patience_ms": None}}))
    places: dict[str, list[int]] = {}
    for owner, weight in (("a", 1), ("b", 4)):
        ticket = admission.begin([of_key(owner, str(n), 1, weight=weight) for n in range(12)], 0.0, EPOCH_MS)
        assert isinstance(ticket, Ticket)
        places[owner] = [request.score_ms - request.deadline_ms for request in ticket.requests]
    deadline_ms = ticket.tier.deadline_ms
    assert places["a"] == [0, 0, 0, 0] + [n * deadline_ms for n in range(1, 9)]
    assert places["b"] == [0, 0, 0, 0] + [n * deadline_ms // 4 for n in range(1, 9)]
