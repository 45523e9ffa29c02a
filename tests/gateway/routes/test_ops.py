"""Models, health, readiness, metrics and logs."""

import asyncio
from functools import partial
from unittest import mock

import httpx
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from gateway.http.exposition import WorkerPages, render
from gateway.http.metrics import ModelMetrics
from gateway.identity import Keyring
from gateway.routes import ops
from scheduler.registry.worker_status import TierStatus, WorkerStart, WorkerStatus
from tests.gateway.api_keys import key
from tests.gateway.stand import running_stand
from tests.gateway.tiny_model import CONTEXT, MODEL, token_ids
from tests.scheduler.queue.harness import ManualClock
from tests.waiting import until

WORKER_METRICS = """\
# HELP tidegate_num_requests_waiting Waiting.
# TYPE tidegate_num_requests_waiting gauge
tidegate_num_requests_waiting{tier="realtime"} 3
# HELP tidegate_generation_tokens_total Tokens.
# TYPE tidegate_generation_tokens_total counter
tidegate_generation_tokens_total{tier="bulk"} 7
# HELP tidegate_step_seconds Steps.
# TYPE tidegate_step_seconds histogram
tidegate_step_seconds_bucket{le="0.1"} 1
tidegate_step_seconds_bucket{le="+Inf"} 2
tidegate_step_seconds_count 2
tidegate_step_seconds_sum 0.5
"""


async def test_a_model_has_its_limits_and_what_clients_of_vllm_read() -> None:
    async with running_stand() as stand:
        listed = (await stand.http.get("/v1/models")).json()["data"]
        one = (await stand.http.get(f"/v1/models/{MODEL}")).json()
        probes = [await stand.http.head(path) for path in ("/v1/models", f"/v1/models/{MODEL}", "/v1/models/nope")]
    assert listed[0] == one
    assert (one["max_model_len"], one["context_length"], one["parent"]) == (CONTEXT, CONTEXT, None)
    assert [model["root"] for model in listed] == [MODEL, MODEL]
    assert one["permission"][0]["allow_sampling"] is True
    assert (one["capabilities"]["completion_chat"], one["capabilities"]["function_calling"]) == (True, False)
    assert [(probe.status_code, probe.content) for probe in probes] == [(200, b""), (200, b""), (404, b"")]


async def test_version_and_ping() -> None:
    keyring = Keyring([key("right")])
    async with running_stand(with_worker=False, keyring=keyring) as stand:
        version = (await stand.http.get("/version")).json()["version"]
        assert version == (await stand.http.get("/openapi.json")).json()["info"]["version"]
        for method in ("GET", "POST", "HEAD"):
            ping = await stand.http.request(method, "/ping")
            assert (ping.status_code, ping.content) == (200, b"")


async def test_health_root_and_docs() -> None:
    async with running_stand(with_worker=False) as stand:
        assert (await stand.http.get("/health")).status_code == 200
        probe = await stand.http.head("/health")
        assert (probe.status_code, probe.content) == (200, b"")
        assert (await stand.http.head("/ready")).status_code == 503
        assert (await stand.http.post("/health")).headers["allow"] == "GET, HEAD"
        assert (await stand.http.get("/")).json()["models"] == [MODEL, "alias"]
        assert (await stand.http.get("/docs")).status_code == 200
        paths = (await stand.http.get("/openapi.json")).json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages"} == set(body["required"])


async def test_ready_needs_worker_and_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stand() as stand:
        response = await stand.http.get("/ready")
        assert (response.status_code, response.json()["missing"]) == (200, [])
        assert response.json()["waiting"]["realtime"] == 0

        async def broken() -> dict[str, int]:
            raise ConnectionError("no store")

        monkeypatch.setattr(stand.gateway.client, "depths", broken)
        response = await stand.http.get("/ready")
        assert (response.status_code, response.json()["missing"]) == (503, ["store"])
        monkeypatch.undo()
        stand.gateway.client.drain()
        response = await stand.http.get("/ready")
        assert (response.status_code, response.json()["draining"]) == (503, True)
    async with running_stand(with_worker=False) as stand:
        response = await stand.http.get("/ready")
    assert (response.status_code, response.json()["missing"]) == (503, ["worker"])


async def test_a_gateway_whose_workers_come_on_demand_is_ready_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stand(with_worker=False) as stand:
        monkeypatch.setattr(stand.gateway.client.wait, "scales_from_zero", True)
        response = await stand.http.get("/ready")
    assert (response.status_code, response.json()["missing"]) == (200, [])


async def test_ready_says_what_a_worker_does_that_starts() -> None:
    async with running_stand(with_worker=False) as stand:
        assert (await stand.http.get("/ready")).json()["starting"] == []
        await stand.worker.registry.announce_start(WorkerStart("w1", "loading the model", 12.34, 0.25))
        response = await stand.http.get("/ready")
    assert response.status_code == 503 and response.json()["missing"] == ["worker"]
    assert response.json()["starting"] == [{"id": "w1", "phase": "loading the model", "seconds": 12.3, "share": 0.25}]


def samples_of(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def worker_pages(**answers: httpx.Response | Exception) -> WorkerPages:
    """Return the pages of workers whose metrics are shown, by id."""

    async def answer(request: httpx.Request) -> httpx.Response:
        found = answers[request.url.host]
        if isinstance(found, Exception):
            raise found
        return found

    return WorkerPages(answers, httpx.MockTransport(answer))


async def test_metrics_of_a_gateway_and_of_the_worker_that_was_started_with_it() -> None:
    others = [WorkerStatus("w2", (), 1, 1, 0, page="http://w2/metrics")]  # its page is not this gateway's to show
    pages = worker_pages(w1=httpx.Response(200, text=WORKER_METRICS))
    async with running_stand(worker_pages=pages, workers=others) as stand:
        await stand.post("/v1/chat/completions", {"model": "nope", "messages": []})
        await stand.http.get("/made/up")
        response = await stand.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = samples_of(response.text)
    assert samples["tidegate_num_requests_waiting", (("tier", "realtime"), ("worker", "w1"))] == 3
    assert samples["tidegate_generation_tokens_total", (("tier", "bulk"), ("worker", "w1"))] == 7
    assert samples["tidegate_step_seconds_bucket", (("le", "0.1"), ("worker", "w1"))] == 1
    assert samples["tidegate_workers_alive", ()] == 2
    labels = (("method", "POST"), ("route", "/v1/chat/completions"), ("status", "400"))
    assert samples["tidegate_http_requests_total", labels] == 1
    assert samples["tidegate_http_requests_total", (("method", "-"), ("route", "unmatched"), ("status", "404"))] == 1


async def test_a_gateway_shows_only_its_own_metrics_if_no_worker_was_started_with_it() -> None:
    async with running_stand() as stand:
        text = (await stand.http.get("/metrics")).text
    assert "tidegate_workers_alive 1.0" in text and "worker=" not in text and "vllm:" not in text


@pytest.mark.parametrize("answer", [httpx.ConnectError("gone"), httpx.ReadTimeout("late"), httpx.Response(500)])
async def test_a_worker_that_does_not_answer_is_left_out(answer: httpx.Response | Exception) -> None:
    async with running_stand(worker_pages=worker_pages(w1=answer)) as stand:
        response = await stand.http.get("/metrics")
    assert response.status_code == 200
    assert "tidegate_workers_alive 1.0" in response.text and "worker=" not in response.text


async def test_metrics_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stand(worker_pages=worker_pages(w1=httpx.Response(200, text=WORKER_METRICS))) as stand:
        monkeypatch.setattr(stand.gateway.client, "backlogs", mock.AsyncMock(side_effect=ConnectionError("no store")))
        response = await stand.http.get("/metrics")
    assert response.status_code == 200
    assert "tidegate_workers_alive 1.0" in response.text and "tidegate_store_up 0.0" in response.text
    assert 'worker="w1"' in response.text


def many_workers(count: int) -> list[WorkerStatus]:
    tiers = {name: TierStatus(queued=3, running=5, finished_per_s=1.0) for name in ("realtime", "bulk", "batch")}
    return [WorkerStatus(f"w{number}", (MODEL,), CONTEXT, 1000, 0, tiers=tiers) for number in range(10, 10 + count)]


async def test_a_page_and_what_is_asked_of_the_store_for_it_do_not_grow_with_the_workers(redis_client: Redis) -> None:
    series, commands = [], []
    for count in (1, 50):
        async with running_stand(workers=many_workers(count)) as stand:
            await stand.http.get("/metrics")  # the first one loads what later ones have
            before = (await redis_client.info("stats"))["total_commands_processed"]
            series.append(len(samples_of((await ops.exposition(stand.gateway)).decode())))
            commands.append((await redis_client.info("stats"))["total_commands_processed"] - before)
            assert stand.metric("tidegate_workers_alive") == 1 + count
    assert series[0] == series[1] > 100
    assert max(commands) <= 30  # the gateway's own rounds, such as its probe of writes, may come between


async def test_metrics_say_how_full_the_store_is_and_which_workers_were_lost() -> None:
    async with running_stand(store_replicas=2, scale_from_zero=True) as stand:
        await stand.http.get("/metrics")
        await stand.worker.registry.announce(WorkerStatus("w2", (), 1, 1, 0))
        assert await stand.worker.registry.remove_silent("w2")
        await ops.exposition(stand.gateway)
        assert 0 < stand.metric("tidegate_store_memory_bytes") < stand.metric("tidegate_store_memory_limit_bytes")
        assert stand.metric("tidegate_store_replicas_expected") == 2
        assert stand.metric("tidegate_workers_required") == 0
        assert stand.metric("tidegate_workers_lost_total") == 1


def test_only_workers_that_were_lost_since_the_last_reading_count() -> None:
    metrics = ModelMetrics()
    lost = []
    for total in (7, 7, 9, 0, 1):  # 7 were lost before this gateway, and a failover has lost the number
        metrics.show_lost_workers(total)
        lost.append(metrics.registry.get_sample_value("tidegate_workers_lost_total"))
    assert lost == [0, 0, 2, 2, 3]


async def test_metrics_are_rendered_once_for_many_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_stand() as stand:
        asked = mock.AsyncMock(wraps=stand.gateway.client.backlogs)
        monkeypatch.setattr(stand.gateway.client, "backlogs", asked)
        clock = ManualClock()
        page = ops.Shared(partial(ops.exposition, stand.gateway), clock, ops.METRICS_PERIOD_S)
        assert len({await page.read() for _ in range(20)}) == 1
        await asyncio.gather(*(page.read() for _ in range(20)))
        assert asked.await_count == 1
        clock.advance(ops.METRICS_PERIOD_S)
        await asyncio.gather(*(page.read() for _ in range(20)))
        assert asked.await_count == 2


@pytest.mark.parametrize(
    "malformed", ["tidegate_x{", 'tidegate_x{a="b"} many', "# TYPE a b c\na 1", WORKER_METRICS + "tidegate_x{"]
)
async def test_a_malformed_page_hides_no_other_metrics(malformed: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with running_stand(with_worker=False) as stand:
            text = render(stand.gateway.metrics.registry, {"a": malformed, "b": WORKER_METRICS}).decode()
    assert "tidegate_workers_alive" in text
    assert samples_of(text)["tidegate_generation_tokens_total", (("tier", "bulk"), ("worker", "b"))] == 7
    assert 'worker="a"' not in text
    assert [entry["worker"] for entry in logs if entry["event"] == "worker_metrics_malformed"] == ["a"]


async def test_logs_know_request_and_tier_but_no_text() -> None:
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
        async with running_stand("private answer") as stand:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "private question"}]}
            headers = {"x-client-request-id": "mine", "x-stainless-retry-count": "1"}
            response = await stand.post("/v1/chat/completions", {**body, "service_tier": "flex"}, headers=headers)
            repeated = {"x-stainless-retry-count": "1" * 10_000}
            await stand.post("/v1/chat/completions", {**body, "stream": True}, headers=repeated)
            await until(lambda: sum(entry["event"] == "request" for entry in logs) == 2)
    first, second = (entry for entry in logs if entry["event"] == "request")
    assert first["request_id"] == response.headers["x-request-id"]
    assert (first["tier"], first["status"], first["client_request_id"]) == ("bulk", 200, "mine")
    assert (first["retry_count"], first["completion_tokens"]) == ("1", len(token_ids("private answer")))
    assert (second["tier"], second["client_request_id"]) == ("realtime", None)
    assert len(second["retry_count"]) < 100
    assert "private" not in repr(logs)


async def test_load_counts_open_requests() -> None:
    async with running_stand() as stand:
        assert (await stand.http.get("/load")).json() == {"server_load": 0}
        stand.worker.gate.clear()
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        task = asyncio.create_task(stand.post("/v1/chat/completions", chat))
        await until(lambda: bool(stand.worker.served))
        assert (await stand.http.get("/load")).json() == {"server_load": 1}
        stand.worker.gate.set()
        await task
