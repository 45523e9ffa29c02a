"""Admission over HTTP: refusals with a reason and Retry-After, demotion, and deadlines of requests."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

from gateway.identity import ApiKey, Keyring, demotion_of, patient_service_tier
from scheduler.client.rejection import Rejected, RejectReason
from scheduler.client.token_stream import TokenStream
from scheduler.registry.worker_status import TierCapacity
from scheduler.request import Request, TokenEvent
from tests.gateway.api_keys import key
from tests.gateway.protocol.test_errors import CHAT, error_of
from tests.gateway.scripted_worker import answer_with
from tests.gateway.stand import Stand, make_tiers, running_stand
from tests.waiting import until

SLOW = TierCapacity(step_s=0.01, slots_free=64, prefill_tokens_per_s=10.0, output_tokens_per_s=10.0)
# One chat meets the realtime tier's SLO of 500 ms; a second one behind it does not.
JUST = replace(SLOW, prefill_tokens_per_s=25.0)
# Two ways to refuse what comes later than 500 ms: the strict form, and the tier's own patience.
STRICT: dict[str, Any] = {"predict": True}
IMPATIENT: dict[str, Any] = {"patience_ms": 500}
BULK = {**CHAT, "service_tier": "flex"}
HELLO = answer_with("Hello!")


@pytest.fixture(autouse=True)
def heartbeats_never_get_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand's worker announces its capacity once only."""
    monkeypatch.setattr("scheduler.client.ttft_forecast.STALE_S", math.inf)


def silent_above(request: Request) -> Sequence[TokenEvent]:
    """Answer bulk requests only: realtime requests get no token."""
    return [] if request.tier == "realtime" else HELLO(request)


async def occupy(stand: Stand, body: dict[str, Any] = CHAT) -> "asyncio.Task[Any]":
    """Start a request that waits for its first token."""
    before = stand.waiting
    waiting = asyncio.create_task(stand.post("/v1/chat/completions", body))
    await until(lambda: stand.waiting > before)
    return waiting


@pytest.mark.parametrize("admission", [STRICT, IMPATIENT])
async def test_an_overloaded_tier_refuses_with_a_reason_and_retry_after(admission: dict[str, Any]) -> None:
    tiers = make_tiers(realtime={"admission": admission})
    async with running_stand(silent_above, capacity=JUST, tiers=tiers) as stand:
        first = await occupy(stand)
        response = await stand.post("/v1/chat/completions", {**CHAT, "stream": True})
        with pytest.raises(openai.InternalServerError) as raised:
            await stand.client.chat.completions.create(**CHAT)
        metrics = (await stand.http.get("/metrics")).text
        refused = stand.metric("tidegate_requests_rejected_total", tier="realtime", reason="overloaded")
        first.cancel()
    error = error_of(response, 503)
    assert (error["type"], error["code"], error["param"]) == ("server_error", "server_overloaded", None)
    assert error["message"].startswith("The realtime tier is overloaded: a first token would take about")
    assert error["message"].endswith(
        f'With `"service_tier": "flex"` it would wait its turn. Try again in {response.headers["retry-after"]} s.'
    )
    assert 1 <= int(response.headers["retry-after"]) <= 120
    assert 0 < int(response.headers["retry-after-ms"]) <= 1000 * int(response.headers["retry-after"])
    assert raised.value.code == "server_overloaded"
    assert refused == 2
    assert 'tidegate_predicted_ttft_seconds{tier="realtime"}' in metrics
    assert 'tidegate_queued_tokens{kind="prompt",tier="bulk"} 0.0' in metrics


@pytest.mark.parametrize(
    ("key", "way_out"),
    [(None, "flex"), (frozenset({"realtime", "bulk"}), "flex"), (frozenset({"realtime"}), None)],
)
def test_the_way_out_is_a_tier_that_the_key_may_use(key: frozenset[str] | None, way_out: str | None) -> None:
    tiers = make_tiers()
    asking = None if key is None else ApiKey("k", b"", key)
    assert patient_service_tier(tiers["realtime"], asking, tiers) == way_out
    assert patient_service_tier(tiers["bulk"], asking, tiers) is None, "batch has no service_tier"


@pytest.mark.parametrize("admission", [STRICT, IMPATIENT])
async def test_a_request_that_is_demoted_is_served_and_reports_the_lower_tier(admission: dict[str, Any]) -> None:
    tiers = make_tiers(realtime={"admission": {**admission, "demote_to": "bulk"}})
    async with running_stand(silent_above, capacity=JUST, tiers=tiers) as stand:
        first = await occupy(stand)
        whole = await stand.client.chat.completions.create(**CHAT)
        stream = await stand.client.chat.completions.create(**CHAT, stream=True)
        chunks = [chunk async for chunk in stream]
        demoted = stand.metric("tidegate_requests_demoted_total", tier="realtime", to="bulk")
        refused = stand.metric("tidegate_requests_rejected_total", tier="realtime", reason="overloaded")
        first.cancel()
        served = [r for r in stand.worker.served if r.tier == "bulk"]
    assert whole.service_tier == "flex" and {chunk.service_tier for chunk in chunks} == {"flex"}
    assert (demoted, refused) == (2, 0)
    assert {r.deadline_ms - r.arrival_ms for r in served} == {tiers["bulk"].deadline_ms}


async def test_a_key_that_floods_its_tier_is_demoted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stand(tiers=make_tiers(realtime={"admission": {"demote_to": "bulk"}})) as stand:
        submit = stand.gateway.client.submit

        async def refuse(requests: Sequence[Request]) -> TokenStream | Rejected:
            is_refused = requests[0].tier == "realtime"
            return Rejected(RejectReason.KEY_LIMIT, "Too many.", 1.0) if is_refused else await submit(requests)

        monkeypatch.setattr(stand.gateway.client, "submit", refuse)
        assert (await stand.client.chat.completions.create(**CHAT)).service_tier == "flex"


async def test_no_request_is_demoted_into_a_full_queue() -> None:
    tiers = make_tiers(realtime={"admission": {**STRICT, "demote_to": "bulk"}}, bulk={"queue_limit": 1})
    async with running_stand(silent_above, capacity=JUST, tiers=tiers) as stand:
        stand.worker.claims = False
        waiting = [await occupy(stand), await occupy(stand)]
        response = await stand.post("/v1/chat/completions", CHAT)
        for task in waiting:
            task.cancel()
    assert error_of(response, 503)["message"].startswith("The realtime tier is overloaded")


@pytest.mark.trap(12)
def test_trap_12_a_keys_tiers_limit_demotion_too() -> None:
    tiers = make_tiers(realtime={"admission": {"demote_to": "bulk"}})
    both, realtime = (ApiKey("k", b"", frozenset(names)) for names in (("realtime", "bulk"), ("realtime",)))
    lower = demotion_of(tiers["realtime"], both, tiers)
    assert lower is not None and (lower.tier.name, lower.service_tier) == ("bulk", "flex")
    assert demotion_of(tiers["realtime"], None, tiers) == lower
    assert demotion_of(tiers["realtime"], realtime, tiers) is None
    assert demotion_of(tiers["bulk"], both, tiers) is None


@pytest.mark.trap(12)
@pytest.mark.parametrize("priority", [-(10**6), -1, 0, 1, 10**6])
async def test_trap_12_a_priority_number_opens_no_tier_that_the_key_may_not_use(priority: int) -> None:
    """A `priority` number in a body has no effect: the key and `service_tier` decide on the tier."""
    secret = Keyring([key("bulk", frozenset({"bulk"}))])
    async with running_stand(keyring=secret) as stand:
        for asked in ({}, {"service_tier": "priority"}, {"service_tier": "default"}):
            body = {**CHAT, **asked, "priority": priority}
            answer = await stand.post("/v1/chat/completions", body, headers={"authorization": "Bearer sk-bulk"})
            assert answer.json()["service_tier"] == "flex"
        number = await stand.post(
            "/v1/chat/completions",
            {**CHAT, "service_tier": priority},
            headers={"authorization": "Bearer sk-bulk"},
        )
        assert error_of(number, 400)["param"] == "service_tier"
        assert {r.tier for r in stand.worker.served} == {"bulk"}


# -- deadlines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "service_tier", "left_ms"),
    [
        (None, "flex", 60_000),
        (5_000, "flex", 5_000),
        (10**12, "flex", 60_000),
        (5_000, "default", 10_000),
    ],
)
async def test_a_deadline_can_only_be_earlier_and_only_in_tiers_without_an_slo(
    asked: int | None, service_tier: str, left_ms: int
) -> None:
    tiers = make_tiers(realtime={"deadline_ms": 10_000}, bulk={"deadline_ms": 60_000})
    async with running_stand(tiers=tiers) as stand:
        body = {**CHAT, "service_tier": service_tier, "deadline_ms": asked}
        assert (await stand.post("/v1/chat/completions", body)).status_code == 200
        [served] = stand.worker.served
    assert served.deadline_ms - served.arrival_ms == left_ms


async def test_a_deadline_that_would_be_missed_is_refused_at_once() -> None:
    async with running_stand(silent_above, capacity=SLOW) as stand:
        stand.worker.claims = False
        soon = {**BULK, "deadline_ms": 6000}
        waiting = [await occupy(stand, soon) for _ in range(5)]  # each takes 1.1 s
        response = await stand.post("/v1/chat/completions", soon)
        later = await occupy(stand, BULK)
        before = await occupy(stand, {**BULK, "deadline_ms": 2000})  # its deadline is later, so it is not ahead
        refused = stand.metric("tidegate_requests_rejected_total", tier="bulk", reason="deadline")
        for task in (*waiting, later, before):
            task.cancel()
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("resource_unavailable", "resource_unavailable")
    assert error["message"].startswith("The bulk tier cannot finish this by its deadline: it would take about")
    assert 1 <= int(response.headers["retry-after"]) <= 120 and "x-should-retry" not in response.headers
    assert refused == 1
