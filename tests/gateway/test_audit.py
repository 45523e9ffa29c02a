"""The audit log: who changed tiers, keys and dead letters."""

from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import structlog
import yaml
from redis.asyncio import Redis

from gateway import audit
from gateway.audit import AuditLog
from gateway.dead_letters import DeadLetter
from gateway.identity import Keyring
from gateway.keys.source import KeySource
from scheduler.clock import SystemClock
from scheduler.store.errors import StoreRefused
from tests.gateway.api_keys import as_, key
from tests.gateway.stand import Stand, make_tiers, running_stand

KEYS = Keyring([key("root", role="admin"), key("night", role="operate"), key("eyes", role="read")])


async def entries(stand: Stand, **query: Any) -> list[dict[str, Any]]:
    answer = await stand.http.get("/admin/audit", headers=as_("eyes"), params=query)
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


def told(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(entry["key"], entry["action"], entry["subject"]) for entry in found]


async def post_tiers(stand: Stand, document: Any, name: str = "root") -> httpx.Response:
    kind = {"content-type": "application/yaml"}
    return await stand.http.post("/admin/tiers", content=yaml.safe_dump(document), headers=as_(name) | kind)


async def test_changes_of_tiers_and_dead_letters_name_the_caller(redis_client: Redis) -> None:
    async with running_stand(redis=redis_client, keyring=KEYS) as stand:
        document = make_tiers(batch={"priority": 1}).document(defaults=True)
        with structlog.testing.capture_logs() as logs:
            generation = (await post_tiers(stand, document)).json()["generation"]
        assert (await post_tiers(stand, document)).json()["changed"] is False
        assert (await post_tiers(stand, {"tiers": {}})).status_code == 400
        assert (await post_tiers(stand, document, "night")).status_code == 403
        for number in range(2):
            await stand.gateway.dead_letters.add(DeadLetter(f"r{number}", "bulk", 4, "died", SystemClock().wall_ms()))
        assert (await stand.http.delete("/admin/dead-letters/r0", headers=as_("night"))).status_code == 200
        assert (await stand.http.delete("/admin/dead-letters/r0", headers=as_("night"))).status_code == 404
        assert (await stand.http.post("/admin/dead-letters/r1/retry", headers=as_("night"))).status_code == 409
        found = await entries(stand)
    expected = [("night", "dead_letter.delete", "r0"), ("root", "tiers.change", f"generation {generation}")]
    assert told(found) == expected, "only what was changed"
    assert (found[0]["address"], found[0]["gateway"]) == ("127.0.0.1", "gateway 1")
    line = next(entry for entry in logs if entry["event"] == "audit")
    assert (line["key"], line["action"], line["gateway"]) == ("root", "tiers.change", "gateway 1")


async def test_the_list_has_pages_and_a_bound(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_ENTRIES", 5)
    async with running_stand(redis=redis_client, keyring=KEYS) as stand:
        for number in range(7):
            await stand.gateway.audit.add("test", str(number))
        first = await entries(stand, limit=2)
        rest = await entries(stand, limit=100, after=first[-1]["id"])
        wrong = await stand.http.get("/admin/audit?after=x", headers=as_("eyes"))
    assert told(first + rest) == [(None, "test", str(number)) for number in (6, 5, 4, 3, 2)]
    assert wrong.status_code == 400


async def test_while_the_store_takes_no_writes_the_log_still_has_it(redis_client: Redis) -> None:
    entry = AuditLog(redis_client, SystemClock(), "gateway 1")
    refusing = mock.AsyncMock(side_effect=StoreRefused("it is full"))
    with mock.patch.object(redis_client, "xadd", refusing), structlog.testing.capture_logs() as logs:
        await entry.add("tiers.change", "generation 3", "root")
    assert [line["subject"] for line in logs] == ["generation 3"] and await entry.page(10) == []


async def test_a_changed_keys_file_names_what_has_come_and_gone(redis_client: Redis, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: one}, {name: b, key: two}, {name: c, key: three}]")
    source, log = KeySource(path, [], make_tiers, SystemClock()), AuditLog(redis_client, SystemClock(), "gateway 1")
    source.on_change = log.add
    await source.reload()
    path.write_text("keys: [{name: a, key: four}, {name: b, key: two, role: read}, {name: c, key: three}]")
    await source.reload()
    path.write_text("keys: [")
    await source.reload()
    (found,) = await log.page(10)
    ids = {k.name: k.sha256.hex()[:8] for k in source.keyring.keys}
    assert found.subject == f"added: a {ids['a']}; removed: a 7692c3ad; changed: b {ids['b']}"
    assert "four" not in found.subject


async def test_a_changed_price_list_names_the_prices(redis_client: Redis, tmp_path: Path) -> None:
    keys, path = "keys: [{name: a, key: one}]\n", tmp_path / "keys.yaml"
    path.write_text(keys + "prices: [{input: 1, output: 2}, {model: m, input: 1, output: 2}]")
    source, log = KeySource(path, [], make_tiers, SystemClock()), AuditLog(redis_client, SystemClock(), "gateway 1")
    source.on_change = log.add
    await source.reload()
    path.write_text(keys + "prices: [{input: 1, output: 3}, {tier: bulk, input: 1, output: 2}]")
    await source.reload()
    (found,) = await log.page(10)
    assert found.action == "prices.change"
    assert found.subject == "added: all models in bulk; removed: m in all tiers; changed: all models in all tiers"


async def test_the_gateway_writes_down_what_its_keys_file_changes(redis_client: Redis) -> None:
    async with running_stand(redis=redis_client, keyring=KEYS) as stand:
        on_change = stand.gateway.key_source.on_change
        assert on_change is not None
        await on_change("prices.change", "added: m in bulk")
        assert told(await entries(stand)) == [(None, "prices.change", "added: m in bulk")]
