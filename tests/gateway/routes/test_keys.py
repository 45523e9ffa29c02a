"""Limits, usage and keys as clients and administrators see them over HTTP."""

import asyncio
import csv
import hashlib
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable

from gateway.identity import Keyring, Project
from gateway.requests.prepare.placement import Placement
from scheduler.request import Request, TokenEvent
from tests.gateway.api_keys import as_, key
from tests.gateway.protocol.test_errors import CHAT, TEXT, error_of
from tests.gateway.stand import Bytes, Stand, make_tiers, running_stand
from tests.scheduler.queue.harness import ManualClock
from tests.waiting import until


class StandingClock(ManualClock):
    """A wall clock that stands still, beside a running one for timeouts."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


KEYS = Keyring(
    [
        key("few", requests_per_minute=2),
        key("short", tokens_per_minute=100),
        key("one", concurrent_requests=1),
        key("free"),
        key("root", role="admin"),
    ]
)


@asynccontextmanager
async def metered(redis: Redis, *args: Any, **options: Any) -> AsyncIterator[Stand]:
    settings: dict[str, Any] = {"keyring": KEYS, "redis": redis, "clock": StandingClock()} | options
    async with running_stand(*args, **settings) as stand:
        yield stand


def left(headers: Any, kind: str) -> int:
    return int(headers[f"x-ratelimit-remaining-{kind}"])


async def usage(stand: Stand, name: str | None, tier: str = "realtime", **query: Any) -> dict[str, int]:
    answer = (await stand.http.get("/admin/usage", headers=as_("root"), params=query)).json()
    rows = {(row["key"], row["tier"]): row for row in answer["total"]}
    return {field: value for field, value in rows.get((name, tier), {}).items() if field not in ("key", "tier")}


@pytest.mark.parametrize("body", [CHAT, {**CHAT, "stream": True}])
async def test_what_is_left_is_said_and_too_much_is_a_429(redis_client: Redis, body: dict[str, Any]) -> None:
    async with metered(redis_client) as stand:
        answers = [await stand.post("/v1/chat/completions", body, headers=as_("few")) for _ in range(3)]
        refused = stand.metric("tidegate_rate_limited_total", key="few", limit="requests")
    assert [left(answer.headers, "requests") for answer in answers] == [1, 0, 0]
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    assert answers[0].headers["x-ratelimit-reset-requests"] == "30s"
    error = error_of(answers[2], 429)
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert (answers[2].headers["retry-after"], answers[2].headers["x-ratelimit-reset-requests"]) == ("30", "1m0s")
    assert refused == 1


async def test_reserved_tokens_come_back_when_the_answer_ends(redis_client: Redis) -> None:
    async with metered(redis_client, "Hello!") as stand:
        bodies = [{**TEXT, "max_tokens": 60}, {**TEXT, "max_tokens": 60, "stream": True}]
        answers = [await stand.post("/v1/completions", body, headers=as_("short")) for body in bodies]
        used = answers[0].json()["usage"]["total_tokens"]
        assert left(answers[1].headers, "tokens") == left(answers[0].headers, "tokens") - used
        last = await stand.post("/v1/completions", bodies[0], headers=as_("short"))
    assert left(last.headers, "tokens") == left(answers[0].headers, "tokens") - 2 * used


async def test_a_request_without_a_maximum_reserves_no_more_than_there_is(redis_client: Redis) -> None:
    async with metered(redis_client) as stand:
        answer = await stand.post("/v1/chat/completions", CHAT, headers=as_("short"))
    assert answer.status_code == 200
    assert left(answer.headers, "tokens") == 0


async def test_every_choice_of_every_prompt_takes_a_place(redis_client: Redis) -> None:
    async with metered(redis_client, keyring=Keyring([key("four", concurrent_requests=4)])) as stand:
        bodies = [{**TEXT, "prompt": ["hi"] * prompts, "n": n} for prompts, n in ((2, 2), (3, 2), (2, 2))]
        answers = [await stand.post("/v1/completions", body, headers=as_("four")) for body in bodies]
    assert [answer.status_code for answer in answers] == [200, 429, 200]
    assert error_of(answers[1], 429)["type"] == "requests"


async def test_one_key_cannot_fill_the_store_with_large_requests(redis_client: Redis) -> None:
    async with metered(redis_client, store_mb=Bytes(4 * 6000)) as stand:
        stand.worker.gate.clear()
        large = {**TEXT, "prompt": [5] * 200}  # it may have 1,000 bytes in the store

        async def ask(name: str, **more: Any) -> Any:
            return await stand.post("/v1/completions", large | more, headers=as_(name))

        open_ones = [asyncio.create_task(ask("free")) for _ in range(4)]
        await until(lambda: stand.waiting == 4)
        refused = await ask("free")
        others = [asyncio.create_task(ask("few")), asyncio.create_task(ask("free", service_tier="flex"))]
        await until(lambda: stand.waiting == 6)
        stand.worker.gate.set()
        answers = await asyncio.gather(*open_ones, *others)
        assert (await ask("free")).status_code == 200
    error = error_of(refused, 429)
    assert "too many bytes" in error["message"] and refused.headers["retry-after"] == "1"
    assert [answer.status_code for answer in answers] == [200] * 6


async def test_a_client_that_hangs_up_pays_for_what_it_got(redis_client: Redis) -> None:
    async with metered(redis_client, "Hello there!") as stand:
        stand.worker.gate.clear()
        body = {**TEXT, "max_tokens": 90}
        asking = asyncio.create_task(stand.post("/v1/completions", body, headers=as_("short")))
        await until(lambda: stand.waiting == 1)
        asking.cancel()
        await until(lambda: stand.waiting == 0)

        async def is_returned() -> bool:
            answer = await stand.post("/v1/completions", {**TEXT, "max_tokens": 97}, headers=as_("short"))
            return answer.status_code == 429 and left(answer.headers, "tokens") >= 95

        await until(is_returned)
        assert (await usage(stand, "short"))["completion_tokens"] == 0


async def test_a_request_that_is_not_served_gives_back_its_tokens(redis_client: Redis) -> None:
    def silent(request: Request) -> Sequence[TokenEvent]:
        return []

    tiers = make_tiers(realtime={"queue_limit": 1})
    async with metered(redis_client, silent, tiers=tiers) as stand:
        stand.worker.claims = False
        waiting = asyncio.create_task(stand.post("/v1/completions", {**TEXT, "max_tokens": 1}, headers=as_("short")))
        await until(lambda: stand.waiting == 1)
        for _ in range(3):  # another key's request would go before the waiting one
            full = await stand.post("/v1/completions", {**TEXT, "max_tokens": 60}, headers=as_("short"))
            assert full.status_code == 503
        waiting.cancel()


async def test_files_and_batches_count_as_requests(redis_client: Redis) -> None:
    async with metered(redis_client) as stand:
        answers = [await stand.http.get("/v1/files", headers=as_("few")) for _ in range(3)]
        models = await stand.http.get("/v1/models", headers=as_("few"))
        free = await stand.http.get("/v1/files", headers=as_("free"))
    assert [left(answer.headers, "requests") for answer in answers] == [1, 0, 0]
    assert [answers[0].status_code, answers[2].status_code] == [200, 429]
    assert models.status_code == 200
    assert "x-ratelimit-limit-requests" not in free.headers


async def test_lines_of_a_batch_are_not_held_up_but_counted(redis_client: Redis) -> None:
    async with metered(redis_client) as stand:
        for number in range(3):
            placement = Placement(make_tiers()["batch"], "flex", f"req_{number}", "few", is_limited=False)
            status, _ = await stand.gateway.models.main.completions.complete("/v1/completions", TEXT, placement)
            assert status == 200
        assert (await usage(stand, "few", "batch"))["requests"] == 3


async def test_without_the_store_a_limited_key_gets_a_503_as_others_do(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(*args: Any, **options: Any) -> None:
        raise StoreUnreachable

    async with metered(redis_client) as stand:
        monkeypatch.setattr(stand.gateway.limits, "_reserve", unreachable)
        refused = [
            await stand.post("/v1/chat/completions", CHAT, headers=as_("few")),
            await stand.http.get("/v1/files", headers=as_("few")),
        ]
        monkeypatch.undo()
        monkeypatch.setattr(stand.gateway.limits, "_settle", unreachable)
        served = await stand.post("/v1/chat/completions", CHAT, headers=as_("short"))
    for answer in refused:
        assert error_of(answer, 503)["code"] == "server_overloaded"
        assert "retry-after" in answer.headers
    assert served.status_code == 200, "what is left over comes back by itself"


async def test_usage_is_exported_as_a_table(redis_client: Redis) -> None:
    async with metered(redis_client, keyring=Keyring([key("a, b"), key("root", role="read")])) as stand:
        await stand.post("/v1/chat/completions", CHAT, headers=as_("a, b"))
        answer = await stand.http.get("/admin/usage?days=2&format=csv", headers=as_("root"))
        as_json = (await stand.http.get("/admin/usage?days=2", headers=as_("root"))).json()
        error_of(await stand.http.get("/admin/usage?format=xml", headers=as_("root")), 400)
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    day = as_json["days"][0]
    texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in day["usage"]]
    assert rows == [{"date": day["date"]} | row for row in texts]
    assert len(rows) == 1 and rows[0]["key"] == "a, b"


async def test_usage_is_exported_as_openmetrics(redis_client: Redis) -> None:
    keys = Keyring([key("one", project=Project("team")), key("root", role="read")])
    clock = StandingClock()
    async with metered(redis_client, keyring=keys, clock=clock) as stand:
        await stand.post("/v1/chat/completions", CHAT, headers=as_("one"))
        yesterday_s = clock.ms // 1000
        clock.advance(86_400)
        for _ in range(2):
            await stand.post("/v1/chat/completions", CHAT, headers=as_("one"))
        answer = await stand.http.get("/admin/usage?days=7&format=openmetrics", headers=as_("root"))
        rows = (await stand.http.get("/admin/usage", headers=as_("root"))).json()["total"]
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    series = {"key": "one", "project": "team", "tier": "realtime"}
    requests = [(s.labels, s.value, float(s.timestamp)) for s in families["tidegate_usage_daily_requests"].samples]
    end_s = yesterday_s // 86_400 * 86_400 + 86_399
    assert requests == [(series, 1, end_s), (series, 2, yesterday_s + 86_400)]
    tokens = {s.labels["kind"]: s.value for s in families["tidegate_usage_daily_tokens"].samples}
    assert tokens["prompt"] == rows[0]["prompt_tokens"] and tokens["completion"] == rows[0]["completion_tokens"]


async def test_usage_is_by_key_tier_and_day(redis_client: Redis) -> None:
    async with metered(redis_client) as stand:
        for name, tier in (("free", "flex"), ("free", "default"), ("root", "flex")):
            await stand.post("/v1/chat/completions", {**CHAT, "service_tier": tier}, headers=as_(name))
        answer = (await stand.http.get("/admin/usage", headers=as_("root"), params={"days": 2})).json()
        metrics = (await stand.http.get("/metrics")).text
        error_of(await stand.http.get("/admin/usage?days=0", headers=as_("root")), 400)
    rows = [(row["key"], row["tier"], row["requests"]) for row in answer["total"]]
    assert rows == [("free", "bulk", 1), ("free", "realtime", 1), ("root", "bulk", 1)]
    assert answer["days"][0]["usage"] == answer["total"]
    assert [day["date"] for day in answer["days"]] == ["2023-11-14", "2023-11-13"]
    assert 'tidegate_usage_requests_total{key="free",tier="bulk"} 1.0' in metrics


async def test_the_keys_in_force_are_shown_without_secrets(redis_client: Redis, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: root, key: sk-root, admin: true, tiers: [bulk], requests_per_minute: 5}]")
    async with metered(redis_client, keyring=None, api_keys=path) as stand:
        path.write_text("keys: [")
        await stand.gateway.key_source.reload()
        answer = await stand.http.get("/admin/keys", headers=as_("root"))
    assert "sk-root" not in answer.text
    shown = answer.json()
    assert (shown["source"], shown["problem"]) == (str(path), f"{path}: not YAML: line 1")
    [row] = shown["keys"]
    assert (row["name"], row["tiers"], row["requests_per_minute"]) == ("root", ["bulk"], 5)
    assert row["id"] == hashlib.sha256(b"sk-root").hexdigest()[:8]


async def test_requests_bear_the_name_and_the_weight_of_their_key() -> None:
    async with running_stand(keyring=Keyring([key("heavy", weight=5), key("usual")])) as stand:
        for name in ("heavy", "usual"):
            assert (await stand.http.post("/v1/chat/completions", json=CHAT, headers=as_(name))).status_code == 200
        assert [(r.owner, r.weight) for r in stand.worker.served] == [("heavy", 5), ("usual", 1)]
