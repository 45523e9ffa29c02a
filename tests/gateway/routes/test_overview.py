"""GET /admin/overview: what it shows of queues, workers and the store, and what is left without the store."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.identity import Keyring
from scheduler.registry.worker_status import GpuStatus, TierStatus
from tests.gateway.offline import ShiftedClock
from tests.gateway.routes.test_admin import key
from tests.gateway.stand import Stand, make_tiers, running_stand
from tests.gateway.tiny_model import MODEL
from tests.waiting import until

SIGNALS = {"ttft_p99_s": 0.7, "itl_p99_s": None, "attainment": 0.9}
SLA = json.dumps({"overloaded": ["realtime"], "tiers": {"realtime": {"signals": SIGNALS}}})
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def overview_of(stand: Stand) -> dict[str, Any]:
    answer = await stand.http.get("/admin/overview")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_it_shows_what_waits_runs_and_how_it_goes() -> None:
    async with running_stand() as stand:
        [status] = await stand.worker.registry.workers()
        gpu = GpuStatus("H100", memory_used_mb=1024, memory_total_mb=81559, busy=0.4)
        tiers = {"realtime": TierStatus(queued=1, running=3, batch_size=8, finished_per_s=2.0)}
        announced = replace(status, tiers=tiers, busy=0.75, kv_usage=0.5, gpus=(gpu,))
        await stand.gateway.client.registry.announce(announced, SLA)
        await until(lambda: [engine.busy for engine in stand.gateway.client.live.engines] == [0.75])
        found = await overview_of(stand)
    assert found["store"]["answers"] and found["store"]["latency_ms"] >= 0
    assert list(found["tiers"]) == ["realtime", "bulk", "batch"]
    realtime = found["tiers"]["realtime"]
    assert (realtime["claimed"], realtime["running"], realtime["finished_per_s"]) == (1, 3, 2.0)
    assert (realtime["ttft_p99_s"], realtime["itl_p99_s"], realtime["attainment"]) == (0.7, None, 0.9)
    assert realtime["overloaded"] and not found["tiers"]["bulk"]["overloaded"]
    [worker] = found["workers"]
    assert (worker["id"], worker["busy"], worker["kv_usage"]) == ("w1", 0.75, 0.5)
    assert worker["gpus"] == [{"name": "H100", "memory_used_mb": 1024, "memory_total_mb": 81559, "busy": 0.4}]
    assert worker["tiers"] == {"realtime": {"claimed": 1, "running": 3, "batch_size": 8}}
    assert 0 <= worker["heartbeat_age_s"] < 60


async def test_the_age_of_a_queue_is_that_of_its_head() -> None:
    clock = ShiftedClock()
    async with running_stand(clock=clock) as stand:
        stand.worker.claims = False
        asking = asyncio.create_task(stand.post("/v1/chat/completions", {**CHAT, "service_tier": "flex"}))
        await until(lambda: stand.waiting == 1)
        clock.shift_s = 7
        tiers = (await overview_of(stand))["tiers"]
        text = (await stand.http.get("/metrics")).text
        stand.worker.claim_again()
        await asking
    assert tiers["bulk"]["waiting"] == 1 and tiers["bulk"]["waiting_prompt_tokens"] > 0
    assert 7 <= tiers["bulk"]["head_waited_s"] < 30
    assert (tiers["realtime"]["waiting"], tiers["realtime"]["head_waited_s"]) == (0, 0)
    ages = [line for line in text.splitlines() if line.startswith('tidegate_queue_age_seconds{tier="bulk"}')]
    assert len(ages) == 1 and float(ages[0].split()[1]) >= 7


async def test_without_a_store_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> dict[str, Any]:
        raise ConnectionError("no store")

    async with running_stand() as stand:
        monkeypatch.setattr(stand.gateway.client, "backlogs", broken)
        found = await overview_of(stand)
        metrics = (await stand.http.get("/metrics")).text
    assert found["store"] == {"answers": False, "latency_ms": None, "refusal": None}
    assert found["tiers"]["realtime"]["waiting"] is None and found["batches"] is None
    assert [worker["id"] for worker in found["workers"]] == ["w1"]
    assert "tidegate_store_up 0.0" in metrics and "tidegate_queue_age_seconds{" not in metrics


async def test_counters_are_zero_before_their_first_event() -> None:
    tiers = make_tiers(realtime={"admission": {"patience_ms": 1000, "demote_to": "bulk"}})
    limited = replace(key("user"), requests_per_minute=5)
    async with running_stand(tiers=tiers, keyring=Keyring([limited]), with_worker=False) as stand:
        text = (await stand.http.get("/metrics")).text
    for series in (
        'tidegate_requests_rejected_total{reason="overloaded",tier="realtime"}',
        'tidegate_requests_demoted_total{tier="realtime",to="bulk"}',
        'tidegate_client_disconnects_total{tier="bulk"}',
        'tidegate_connections_closed_total{reason="too_many"}',
        'tidegate_rate_limited_total{key="user",limit="tokens"}',
        'tidegate_answer_cache_total{result="hit"}',
        'tidegate_http_requests_total{method="POST",route="/v1/chat/completions",status="503"}',
    ):
        assert f"{series} 0.0" in text, series
