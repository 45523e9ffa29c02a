"""API keys that administrators create over HTTP: for all gateways of a store, beside those of the keys file."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as StoreUnreachable

from gateway.keys.file import KeyEntry
from gateway.keys.stored import StoredKeys
from gateway.store_keys import GatewayKeys
from tests.gateway.protocol.test_errors import CHAT, error_of
from tests.gateway.stand import Stand, running_stand
from tests.waiting import until

FILE = """
keys:
  - {name: web, key: sk-web}
  - {name: eyes, key: sk-eyes, role: read}
projects: [{name: team, requests_per_minute: 100}]
"""


@asynccontextmanager
async def gateway(redis: Redis, file: Path | None = None, **options: Any) -> AsyncIterator[Stand]:
    settings: dict[str, Any] = {"redis": redis, "api_keys": file, "api_key": SecretStr("sk-operator")} | options
    async with running_stand(**settings) as stand:
        yield stand


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    return path


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def create(stand: Stand, secret: str = "sk-operator", **body: Any) -> httpx.Response:
    return await stand.post("/admin/keys", body, headers=bearer(secret))


async def status(stand: Stand, secret: str) -> int:
    return (await stand.post("/v1/chat/completions", CHAT, headers=bearer(secret))).status_code


async def shown(stand: Stand) -> dict[str, Any]:
    answer: dict[str, Any] = (await stand.http.get("/admin/keys", headers=bearer("sk-operator"))).json()
    return answer


async def test_a_created_key_works_on_all_gateways_until_it_is_revoked(redis_client: Redis, file: Path) -> None:
    async with gateway(redis_client, file) as one, gateway(redis_client, file) as two:
        made = (await create(one, name="new", project="team", tiers=["bulk"], budget={"tokens_per_day": 500})).json()
        assert (made["object"], made["name"], made["project"]) == ("organization.project.api_key", "new", "team")
        assert made["created_at"] and made["value"].startswith("sk-")
        assert await status(one, made["value"]) == 200
        await two.gateway.key_source.follow_store()
        assert await status(two, made["value"]) == 200
        assert await status(two, "sk-web") == await status(two, "sk-operator") == 200, "the others work as before"
        [row] = [row for row in (await shown(two))["keys"] if row["name"] == "new"]
        assert (row["id"], row["tiers"], row["budget"]["tokens_per_day"]) == (made["id"], ["bulk"], 500)
        assert row["spent"]["day"]["tokens"] > 0
        gone = await two.http.delete(f"/admin/keys/{made['id']}", headers=bearer("sk-operator"))
        expected = {"object": "organization.project.api_key.deleted", "id": made["id"], "deleted": True}
        assert gone.json() == expected
        await one.gateway.key_source.follow_store()
        assert [await status(stand, made["value"]) for stand in (one, two)] == [401, 401]


async def test_the_store_has_no_secret_and_a_gateway_that_starts_has_the_keys(redis_client: Redis, file: Path) -> None:
    async with gateway(redis_client, file) as stand:
        secret = (await create(stand, name="new", role="read")).json()["value"]
        stored = await redis_client.hgetall(GatewayKeys.of(redis_client).api_keys)
        assert secret.encode() not in b"".join([*stored.keys(), *stored.values()])
        assert secret not in str(await shown(stand))
    async with gateway(redis_client, file) as stand:
        assert (await stand.http.get("/admin/keys", headers=bearer(secret))).status_code == 200


async def test_gateways_notice_by_themselves(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.keys.source.POLL_S", 0.01)
    async with gateway(redis_client) as one, gateway(redis_client) as two:
        secret = (await create(one, name="new")).json()["value"]

        async def is_accepted() -> bool:
            return await status(two, secret) == 200

        await until(is_accepted)


async def test_a_secret_is_rotated(redis_client: Redis) -> None:
    async with gateway(redis_client) as stand:
        first = (await create(stand, name="new", tiers=["bulk"])).json()
        second = (await create(stand, name="new", rotate=True)).json()
        assert second["tiers"] == ["bulk"]
        assert [await status(stand, one["value"]) for one in (first, second)] == [200, 200]
        await stand.http.delete(f"/admin/keys/{first['id']}", headers=bearer("sk-operator"))
        assert [await status(stand, one["value"]) for one in (first, second)] == [401, 200]
        error_of(await create(stand, name="other", rotate=True), 409)


@pytest.mark.parametrize(
    ("body", "expected", "param"),
    [
        ({"name": "web"}, 409, None),
        ({"name": "operator"}, 409, None),
        ({}, 400, "name"),
        ({"name": "a", "tiers": ["gold"]}, 400, "name"),
        ({"name": "a", "project": "none"}, 400, "name"),
        ({"name": "a", "budget": {"cost_per_day": 1}}, 400, "name"),
        ({"name": "a", "budget": {"tokens_per_day": "1"}}, 400, "budget.tokens_per_day"),
        ({"name": "a", "sha256": "0" * 64}, 400, "sha256"),
        ({"name": "a", "webhook": {"secret": "x"}}, 400, "webhook"),
        ({"name": "a", "key": "sk-own"}, 400, "key"),
        ({"name": "a", "admin": True}, 400, "admin"),
        ({"name": "a", "rotate": "yes"}, 400, "rotate"),
        ({"name": "a", "rotate": 1}, 400, "rotate"),
        ({"name": "a", "rotate": True, "tiers": ["bulk"]}, 400, "tiers"),
        ({"name": "a", "colour": "red"}, 400, "colour"),
    ],
)
async def test_what_cannot_be_created(
    redis_client: Redis, file: Path, body: dict[str, Any], expected: int, param: str | None
) -> None:
    async with gateway(redis_client, file) as stand:
        before = (await shown(stand))["keys"]
        assert error_of(await create(stand, **body), expected)["param"] == param
        assert (await shown(stand))["keys"] == before


async def test_a_name_is_given_once(redis_client: Redis) -> None:
    async with gateway(redis_client) as one, gateway(redis_client) as two:
        answers = await asyncio.gather(*(create(stand, name="new") for stand in (one, two) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7


async def test_no_key_takes_the_id_of_another(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyEntry, "id", "0123abcd")
    async with gateway(redis_client) as stand:
        first = (await create(stand, name="one")).json()
        assert "try again" in error_of(await create(stand, name="two"), 409)["message"]
        assert await status(stand, first["value"]) == 200


async def test_a_key_that_is_not_safe_yet_is_not_told(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_yet(*args: Any) -> None:
        raise StoreUnreachable

    monkeypatch.setattr("gateway.keys.stored.durable", not_yet)
    async with gateway(redis_client) as stand:
        error_of(await create(stand, name="new"), 503)


async def test_a_change_that_the_store_has_lost_is_no_success(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that has crashed confirms what it has left, and the counter of changes is there as before."""
    names = GatewayKeys.of(redis_client)
    async with gateway(redis_client) as stand:
        first = (await create(stand, name="first")).json()
        kept = {name: await redis_client.dump(name) for name in (names.api_keys, names.api_keys_version)}

        async def crash(*args: Any) -> bool:
            for name, value in kept.items():
                await redis_client.restore(name, 0, value, replace=True)
            return True

        monkeypatch.setattr("gateway.keys.stored.durable", crash)
        error_of(await create(stand, name="second"), 503)
        path = f"/admin/keys/{first['id']}"
        error_of(await stand.http.delete(path, headers=bearer("sk-operator")), 503)
        monkeypatch.undo()
        assert await status(stand, first["value"]) == 200
        assert (await create(stand, name="second")).status_code == 200
        assert (await stand.http.delete(path, headers=bearer("sk-operator"))).status_code == 200
        assert await status(stand, first["value"]) == 401


async def test_only_administrators_change_keys_and_it_is_written_down(redis_client: Redis, file: Path) -> None:
    async with gateway(redis_client, file) as stand:
        assert [(await create(stand, secret, name="n")).status_code for secret in ("sk-web", "sk-eyes")] == [403, 403]
        made = (await create(stand, name="new")).json()
        path = f"/admin/keys/{made['id']}"
        assert (await stand.http.delete(path, headers=bearer("sk-eyes"))).status_code == 403
        assert (await stand.http.delete(path, headers=bearer("sk-operator"))).status_code == 200
        assert (await stand.http.delete(path, headers=bearer("sk-operator"))).status_code == 404
        found = (await stand.http.get("/admin/audit", headers=bearer("sk-eyes"))).json()["data"]
    subject = f"new {made['id']}"
    told = [(entry["key"], entry["action"], entry["subject"]) for entry in found]
    assert told == [("operator", "key.revoke", subject), ("operator", "key.create", subject)]


async def test_with_open_access_no_key_is_created(redis_client: Redis) -> None:
    async with running_stand(redis=redis_client) as stand:
        error = error_of(await stand.post("/admin/keys", {"name": "new"}), 409)
        assert "--api-keys" in error["message"]
        assert (await stand.post("/v1/chat/completions", CHAT)).status_code == 200


async def test_the_keys_file_goes_before_the_store(redis_client: Redis, file: Path) -> None:
    async with gateway(redis_client, file) as stand:
        made = (await create(stand, name="new", project="team")).json()
        file.write_text(FILE + "prices: []\n")
        await stand.gateway.key_source.reload()
        assert await status(stand, made["value"]) == 200
        file.write_text(FILE.replace("name: team", "name: crew"))
        await stand.gateway.key_source.reload()
        assert await status(stand, made["value"]) == 401
        assert (await shown(stand))["left_out"] == {made["id"]: "there is no project 'team'"}
        refused = error_of(await create(stand, name="new", rotate=True), 400)
        assert "there is no project 'team'" in refused["message"]
        assert list((await shown(stand))["left_out"]) == [made["id"]], "no further secret of it"
        log = (await stand.http.get("/admin/audit", headers=bearer("sk-operator"))).json()["data"]
        assert (log[0]["action"], log[0]["subject"]) == ("keys.change", f"removed: new {made['id']}")
        file.write_text(FILE.replace("name: web", "name: new"))
        await stand.gateway.key_source.reload()
        assert await status(stand, "sk-web") == 200
        assert "keys file" in (await shown(stand))["left_out"][made["id"]]


async def test_a_record_of_another_version_is_left_out(redis_client: Redis) -> None:
    names = GatewayKeys.of(redis_client)
    await redis_client.hset(names.api_keys, "0badc0de", '{"name": "x", "created_ms": 1, "later": true}')
    await redis_client.incr(names.api_keys_version)
    async with gateway(redis_client) as stand:
        assert (await shown(stand))["left_out"] == {"0badc0de": "it is a record of another version"}
        assert (await create(stand, name="new")).status_code == 200
        gone = await stand.http.delete("/admin/keys/0badc0de", headers=bearer("sk-operator"))
        assert (gone.status_code, (await shown(stand))["left_out"]) == (200, {})


async def test_calls_whose_replies_are_lost_are_done_once(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py sends a script again when its reply is lost."""
    lost: list[str] = []

    async def loses_the_reply(*args: Any, **options: Any) -> Any:
        if not lost:
            lost.append("reply")
            await change(*args, **options)
        return await change(*args, **options)

    async with gateway(redis_client) as stand:
        store = stand.gateway.key_source._store
        assert store is not None
        change = store._change
        monkeypatch.setattr(store, "_change", loses_the_reply)
        made = (await create(stand, name="new")).json()
        assert [row["name"] for row in (await shown(stand))["keys"]] == ["operator", "new"]
        lost.clear()
        gone = await stand.http.delete(f"/admin/keys/{made['id']}", headers=bearer("sk-operator"))
        assert (gone.status_code, len((await shown(stand))["keys"])) == (200, 1)


async def test_without_the_store_the_keys_stay(redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(self: StoredKeys) -> int:
        raise StoreUnreachable

    async with gateway(redis_client) as stand:
        made = (await create(stand, name="new")).json()
        monkeypatch.setattr(StoredKeys, "version", unreachable)
        with pytest.raises(StoreUnreachable):
            await stand.gateway.key_source.follow_store()
        assert await status(stand, made["value"]) == 200
        assert error_of(await create(stand, name="more"), 503)["code"] == "server_overloaded"
