"""The gate: who gets in, when it closes and opens again, and what it never looks at."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.client.admission import Gate
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.config import TierSet
from scheduler.queue.base import Backlog
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus
from scheduler.request import EventKind, Request, TokenEvent
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import make_request, make_tiers

IDLE = TierCapacity(step_s=0.0, slots_free=8, drain_per_s=2.0, prefill_tokens_per_s=1000.0, output_tokens_per_s=1000.0)
PREDICTS: dict[str, Any] = {"admission": {"predict": True}}


def tiers(**more: Any) -> TierSet:
    return make_tiers(realtime={**PREDICTS, **more}, bulk=PREDICTS)


def make_gate(tiers: TierSet, realtime: TierCapacity | None = IDLE, bulk: TierCapacity | None = IDLE) -> Gate:
    gate = Gate(tiers)
    statuses = {
        "realtime": TierStatus(batch_size=8, capacity=realtime),
        "bulk": TierStatus(batch_size=8, capacity=bulk),
    }
    gate.see([WorkerStatus("w", ("m",), 512, 1000, 0, tiers=statuses)], now=0.0, wall_ms=0)
    return gate


def attempt(
    gate: Gate, tiers: TierSet, *requests: Request, ahead: Backlog | None = None, now: float = 0.0
) -> Rejected | None:
    """What the client does with the gate, behind what waits in the store."""
    tier = tiers[requests[0].tier]
    forecast = gate.forecast(tier, requests, now, EPOCH_MS)
    if forecast is None:
        return None
    if (rejected := gate.check_local(tier, forecast)) is not None:
        return rejected
    if not gate.limit(tier, forecast).admits(ahead or Backlog()):
        return gate.refuse(tier, forecast, ahead or Backlog())
    gate.admitted(tier)
    return None


def test_a_first_token_that_would_be_late_is_refused() -> None:
    known = tiers()
    gate = make_gate(known)
    assert attempt(gate, known, make_request("a", prompt=50), ahead=Backlog(1, 440)) is None
    rejected = attempt(gate, known, make_request("b", prompt=50), ahead=Backlog(1, 700))
    assert rejected is not None and rejected.reason is RejectReason.OVERLOADED
    assert "0.75 s" in rejected.message


def test_once_closed_a_tier_opens_again_at_a_part_of_its_promise() -> None:
    """0.5 s are promised, and it opens again where 0.4 s can be kept."""
    known = tiers()
    gate = make_gate(known)
    request = make_request("a", prompt=0)
    assert attempt(gate, known, request, ahead=Backlog(1, 450)) is None
    assert attempt(gate, known, request, ahead=Backlog(1, 510)) is not None
    assert gate.is_closed("realtime")
    assert attempt(gate, known, request, ahead=Backlog(1, 450)) is not None
    assert attempt(gate, known, request, ahead=Backlog(1, 390)) is None
    assert not gate.is_closed("realtime")
    assert attempt(gate, known, request, ahead=Backlog(1, 450)) is None


def test_other_promises_open_what_was_closed_by_those_before() -> None:
    known = tiers()
    gate = make_gate(known)
    assert attempt(gate, known, make_request("a", prompt=0), ahead=Backlog(1, 510)) is not None
    gate.reconfigure(known)
    assert not gate.is_closed("realtime")


@pytest.mark.trap(4)
def test_trap_4_a_burst_is_counted_before_the_heartbeats_know_of_it() -> None:
    """All of it has left the queue at once, and the last heartbeat says that nothing is held."""
    known = tiers()
    gate = make_gate(known)
    entered = 0
    for n in range(50):
        request = make_request(f"r{n}", prompt=100)
        forecast = gate.forecast(known["realtime"], [request], 0.0, EPOCH_MS)
        assert forecast is not None
        if gate.check_local(known["realtime"], forecast) is None:
            gate.enter(known["realtime"], [request], forecast, 0.0)
            entered += 1
    assert entered == 5, "0.5 s at 1000 tokens a second"
    gate.hear(TokenEvent("r0", EventKind.TOKENS, 0, (1,)), now=0.1)
    assert attempt(gate, known, make_request("next", prompt=1)) is not None, "closed at 0.5 s, open again at 0.4 s"
    gate.leave("r1")
    assert attempt(gate, known, make_request("next", prompt=1)) is None


def test_a_burst_of_small_requests_is_counted_by_its_slots() -> None:
    known = tiers()
    gate = make_gate(known)
    entered = [n for n in range(30) if attempt_entering(gate, known, make_request(f"r{n}", prompt=1))]
    assert len(entered) == 8, "as many as there are slots: within 0.5 s, one more becomes free"


def attempt_entering(gate: Gate, tiers: TierSet, request: Request) -> bool:
    forecast = gate.forecast(tiers[request.tier], [request], 0.0, EPOCH_MS)
    assert forecast is not None
    if gate.check_local(tiers[request.tier], forecast) is not None:
        return False
    gate.enter(tiers[request.tier], [request], forecast, 0.0)
    return True


@pytest.mark.trap(7)
def test_trap_7_what_closes_bulk_does_not_close_what_is_above() -> None:
    known = tiers()
    saturated = replace(IDLE, prompt_tokens=10**6, output_tokens=10**6, slots_free=-100)
    gate = make_gate(known, bulk=saturated)
    gate.enter(known["bulk"], [make_request(f"b{n}", "bulk", prompt=500) for n in range(100)], None, 0.0)
    bulk = make_request("b", "bulk", deadline_ms=EPOCH_MS + 600_000)
    rejected = attempt(gate, known, bulk)
    assert rejected is not None and rejected.reason is RejectReason.DEADLINE
    assert attempt(gate, known, make_request("r", prompt=100)) is None
    assert gate.limit(known["realtime"], forecast_of(gate, known)).above == ()
    assert gate.limit(known["bulk"], forecast_of(gate, known)).above == ("realtime",)


def forecast_of(gate: Gate, tiers: TierSet) -> Any:
    return gate.forecast(tiers["realtime"], [make_request()], 0.0, EPOCH_MS)


@pytest.mark.trap(8)
@pytest.mark.parametrize("unknown", ["nothing", "stale", "off", "no promise"])
def test_trap_8_where_nothing_can_be_foretold_the_gate_is_open(unknown: str) -> None:
    known = {
        "off": tiers(admission={"predict": False}),
        "no promise": tiers(slo={"itl_p99_ms": 100}),
    }.get(unknown, tiers())
    gate = make_gate(known, realtime=None if unknown == "nothing" else IDLE)
    now = 60.0 if unknown == "stale" else 0.0
    assert attempt(gate, known, make_request("a", prompt=10**5), ahead=Backlog(10**5, 10**8), now=now) is None


@pytest.mark.trap(8)
def test_trap_8_a_closed_tier_stays_closed_while_nothing_is_known_but_lets_in() -> None:
    known = tiers()
    gate = make_gate(known)
    assert attempt(gate, known, make_request("a", prompt=0), ahead=Backlog(1, 510)) is not None
    assert attempt(gate, known, make_request("a", prompt=0), ahead=Backlog(1, 510), now=60.0) is None
    assert gate.is_closed("realtime"), "held until it is known better"


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    known = tiers()
    gate = make_gate(known)
    request = make_request("b", "bulk", prompt=100, deadline_ms=EPOCH_MS + 2000)
    assert attempt(gate, known, request, ahead=Backlog(5, 1800)) is None
    rejected = attempt(gate, known, request, ahead=Backlog(5, 2300))
    assert rejected is not None and rejected.reason is RejectReason.DEADLINE
    assert not gate.is_closed("bulk"), "a later deadline may still be met"


def test_waits_that_turn_out_longer_are_foretold_longer() -> None:
    known = tiers()
    gate = make_gate(known)
    before = forecast_of(gate, known).prompt_token_s
    for n in range(60):
        ahead, request = make_request(f"a{n}", prompt=200), make_request(f"b{n}", prompt=1)
        gate.enter(known["realtime"], [ahead], forecast_of(gate, known), n)
        gate.enter(known["realtime"], [request], forecast_of(gate, known), n)
        gate.hear(TokenEvent(f"a{n}", EventKind.FINISHED, 0, (1,)), n + 0.2)
        gate.hear(TokenEvent(f"b{n}", EventKind.FINISHED, 0, (1,)), n + 0.6)
    assert forecast_of(gate, known).prompt_token_s > 2 * before


def test_predicted_ttft_is_that_of_a_short_request_that_came_now() -> None:
    known = tiers()
    gate = make_gate(known, realtime=replace(IDLE, step_s=0.01, prompt_tokens=100))
    backlogs = {"realtime": Backlog(2, 300, 50), "bulk": Backlog(9, 9000, 9000)}
    assert gate.predicted_ttft_s(known["realtime"], backlogs, 0.0) == pytest.approx(0.01 + 0.1 + 0.3)
    assert gate.predicted_ttft_s(known["bulk"], backlogs, 0.0) is None
    assert gate.predicted_ttft_s(known["realtime"], backlogs, 60.0) is None
