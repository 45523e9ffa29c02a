"""Budgets, projects and prices as clients and administrators see them over HTTP."""

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from typing import Any

import pytest
from openai.types import Batch
from redis.asyncio import Redis

from gateway.identity import Budget, Keyring, Project
from gateway.keys.prices import Price
from gateway.keys.usage import Owner, UsageMeter, Use
from gateway.store_keys import GatewayKeys
from tests.gateway.api_keys import as_, key, secret_of
from tests.gateway.offline import TERMINAL, jsonl, line
from tests.gateway.protocol.test_errors import CHAT, TEXT, error_of
from tests.gateway.routes.test_keys import StandingClock
from tests.gateway.stand import Stand, running_stand
from tests.waiting import until

TEAM = Project("team", budget=Budget(tokens_per_day=1000))
KEYS = Keyring(
    [
        key("day", budget=Budget(tokens_per_day=100)),
        key("rich", budget=Budget(cost_per_month=1.0)),
        key("one", project=TEAM),
        key("two", project=TEAM),
        key("free"),
        key("root", role="read"),
    ]
)


@asynccontextmanager
async def budgeted(redis: Redis, *args: Any, **options: Any) -> AsyncIterator[Stand]:
    settings: dict[str, Any] = {"keyring": KEYS, "redis": redis, "clock": StandingClock()} | options
    async with running_stand(*args, **settings) as stand:
        yield stand


async def spent(stand: Stand, name: str, of: str = "keys") -> dict[str, Any]:
    shown = (await stand.http.get("/admin/keys", headers=as_("root"))).json()
    found: dict[str, Any] = next(row["spent"] for row in shown[of] if row["name"] == name)
    return found


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_a_request_beyond_the_budget_is_an_insufficient_quota(redis_client: Redis, more: dict[str, Any]) -> None:
    async with budgeted(redis_client) as stand:
        ask = {**TEXT, "max_tokens": 60, **more}
        assert (await stand.post("/v1/completions", ask, headers=as_("day"))).status_code == 200
        used = (await spent(stand, "day"))["day"]["tokens"]
        refused = await stand.post("/v1/completions", {**TEXT, "max_tokens": 99, **more}, headers=as_("day"))
        assert (await stand.http.get("/v1/models", headers=as_("day"))).status_code == 200
        counted = stand.metric("tidegate_rate_limited_total", key="day", limit="budget")
    error = error_of(refused, 429)
    assert (error["type"], error["code"], error["param"]) == ("insufficient_quota", "insufficient_quota", None)
    assert f"100 tokens per day, of which {100 - used} is left" in error["message"]
    assert (refused.headers["x-should-retry"], counted) == ("false", 1)


async def test_the_other_dialects_refuse_in_their_words(redis_client: Redis) -> None:
    async with budgeted(redis_client) as stand:
        asked = {"model": CHAT["model"], "max_tokens": 200, "messages": CHAT["messages"]}
        message = await stand.post("/v1/messages", asked, headers=as_("day"))
        response = await stand.post(
            "/v1/responses", {"model": CHAT["model"], "input": "hi", "max_output_tokens": 200}, headers=as_("day")
        )
    assert (message.status_code, message.json()["error"]["type"]) == (429, "rate_limit_error")
    assert error_of(response, 429)["code"] == "insufficient_quota"


async def test_a_client_has_the_end_of_its_answer_when_it_is_counted(redis_client: Redis) -> None:
    """What the store holds is read past the gateway: so much is left if the gateway is killed now."""
    async with budgeted(redis_client) as stand:
        day = GatewayKeys.of(redis_client).usage_of(date(2023, 11, 14))
        for number, more in enumerate(({}, {"stream": True}), 1):
            answer = await stand.post("/v1/chat/completions", {**CHAT, **more}, headers=as_("free"))
            assert answer.status_code == 200
            assert await redis_client.hget(day, '["free","realtime","requests"]') == str(number).encode()


async def test_without_keys_an_answer_waits_for_no_count(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: UsageMeter) -> None:
        await asyncio.Event().wait()

    async with running_stand(redis=redis_client) as stand:
        with monkeypatch.context() as patched:
            patched.setattr(UsageMeter, "flush", never)
            patched.setattr(UsageMeter, "try_flush", never)
            async with asyncio.timeout(30):
                assert (await stand.post("/v1/completions", TEXT)).status_code == 200
        [rows] = (await stand.gateway.usage.days(1)).values()
        assert [row.use.requests for row in rows] == [1]


async def test_costs_are_those_of_model_and_tier(redis_client: Redis) -> None:
    async with budgeted(redis_client) as stand:
        flex = Price(input=1.0, output=2.0, tier="bulk")
        stand.gateway.key_source.prices.replace([flex, Price(input=10.0, output=20.0)])
        costs = []
        for tier in ("flex", "default"):
            answer = await stand.post("/v1/chat/completions", {**CHAT, "service_tier": tier}, headers=as_("rich"))
            usage = answer.json()["usage"]
            costs.append((usage["prompt_tokens"] + 2 * usage["completion_tokens"]) / 1e6)
        rows = (await stand.http.get("/admin/usage", headers=as_("root"))).json()["total"]
        month = (await spent(stand, "rich"))["month"]
        stand.gateway.key_source.prices.replace([Price(input=1e6, output=0)])
        error = error_of(await stand.post("/v1/chat/completions", CHAT, headers=as_("rich")), 429)
    assert [row["cost"] for row in rows] == [pytest.approx(costs[0]), pytest.approx(10 * costs[1])]
    assert month["cost"] == pytest.approx(costs[0] + 10 * costs[1])
    assert "1 cost per month, of which 0.9" in error["message"] and "2023-12-01T00:00:00Z" in error["message"]


async def test_what_is_refused_or_given_up_costs_nothing(redis_client: Redis) -> None:
    async with budgeted(redis_client) as stand:
        stand.worker.gate.clear()
        body = {**TEXT, "max_tokens": 90}
        asking = asyncio.create_task(stand.post("/v1/completions", body, headers=as_("day")))
        await until(lambda: stand.waiting == 1)
        assert (await spent(stand, "day"))["day"]["tokens"] > 90
        asking.cancel()
        await until(lambda: stand.waiting == 0)

        async def is_given_back() -> bool:
            return int((await spent(stand, "day"))["day"]["tokens"]) < 90

        await until(is_given_back)
        stand.worker.gate.set()
        before = (await spent(stand, "day"))["day"]
        stand.gateway.drain()
        error_of(await stand.post("/v1/completions", {**TEXT, "max_tokens": 9}, headers=as_("day")), 503)
        assert (await spent(stand, "day"))["day"] == before


async def test_an_answer_from_the_cache_costs_nothing_and_needs_something_that_is_left(redis_client: Redis) -> None:
    async with budgeted(redis_client) as stand:
        stand.gateway.key_source.prices.replace([Price(input=10.0, output=20.0)])
        body, headers = {**TEXT, "max_tokens": 90, "temperature": 0}, as_("day") | {"X-Tidegate-Cache": "60"}
        found, costs = [], []
        for _ in range(2):  # the second one could not reserve so much again
            answer = await stand.post("/v1/completions", body, headers=headers)
            found.append((answer.status_code, answer.headers.get("x-tidegate-cache")))
            costs.append(await spent(stand, "day"))
        rest = 100 - costs[1]["day"]["tokens"]
        stand.gateway.usage.record(Owner("day"), "realtime", Use(), charged_tokens=rest)
        await stand.gateway.usage.flush()
        refused = await stand.post("/v1/completions", body, headers=headers)
    assert found == [(200, "miss"), (200, "hit")]
    assert costs[0] == costs[1] and costs[0]["day"]["cost"] > 0
    assert error_of(refused, 429)["code"] == "insufficient_quota"


async def test_usage_is_by_project_too(redis_client: Redis) -> None:
    async with budgeted(redis_client) as stand:
        for name in ("one", "two", "free"):
            assert (await stand.post("/v1/chat/completions", CHAT, headers=as_(name))).status_code == 200
        by_key = (await stand.http.get("/admin/usage", headers=as_("root"))).json()["total"]
        query = {"group_by": "project"}
        by_project = (await stand.http.get("/admin/usage", headers=as_("root"), params=query)).json()["total"]
        table = await stand.http.get("/admin/usage", headers=as_("root"), params={**query, "format": "csv"})
        shown = (await stand.http.get("/admin/keys", headers=as_("root"))).json()
        team = await spent(stand, "team", "projects")
    assert [(row["key"], row["project"], row["requests"]) for row in by_key] == [
        ("free", None, 1),
        ("one", "team", 1),
        ("two", "team", 1),
    ]
    assert [(row["key"], row["project"], row["requests"]) for row in by_project] == [(None, None, 1), (None, "team", 2)]
    assert [(row["project"], row["requests"]) for row in csv.DictReader(io.StringIO(table.text))] == [
        ("", "1"),
        ("team", "2"),
    ]
    assert team["day"]["tokens"] == sum(r["prompt_tokens"] + r["completion_tokens"] for r in by_key if r["project"])
    assert [row["budget"]["tokens_per_day"] for row in shown["projects"]] == [1000]


async def test_a_line_beyond_the_budget_fails_and_the_batch_completes(redis_client: Redis) -> None:
    async with budgeted(redis_client, keyring=Keyring([key("day", budget=Budget(tokens_per_day=10))])) as stand:
        client = stand.client.with_options(api_key=secret_of("day"))

        async def run(num_lines: int) -> Batch:
            lines = jsonl(line(f"q{number}", body={**CHAT, "max_tokens": 8}) for number in range(num_lines))
            file = await client.files.create(file=("input.jsonl", lines), purpose="batch")
            created = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )

            async def is_over() -> bool:
                return (await client.batches.retrieve(created.id)).status in TERMINAL

            await until(is_over)
            return await client.batches.retrieve(created.id)

        spends, fails = await run(1), await run(2)
        failed = (await client.files.content(fails.error_file_id or "")).text.splitlines()
        [[row]] = (await stand.gateway.usage.days(1)).values()
    counts = [batch.request_counts and batch.request_counts.to_dict() for batch in (spends, fails)]
    assert counts == [{"total": 1, "completed": 1, "failed": 0}, {"total": 2, "completed": 0, "failed": 2}]
    assert (fails.status, row.use.requests) == ("completed", 1)
    for answer in map(json.loads, failed):
        assert answer["response"]["status_code"] == 429
        assert answer["response"]["body"]["error"]["code"] == "insufficient_quota"
