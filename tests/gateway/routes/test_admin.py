"""/admin: permissions, changes of the tiers, and refusals."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from redis.asyncio import Redis

from gateway.identity import Keyring
from gateway.protocol.errors import ApiError
from gateway.routes.operators.admin import describe_change
from gateway.state import GatewayTiers
from scheduler.registry.worker_status import TierCapacity
from scheduler.reload.coordinator import Late
from tests.gateway.api_keys import as_, key
from tests.gateway.stand import TIERS, Stand, make_tiers, running_stand
from tests.scheduler.builders import tiers_document
from tests.waiting import until


def changed(**limits: int) -> dict[str, Any]:
    return tiers_document(TIERS["tiers"], {name: {"queue_limit": limits.get(name, 64)} for name in TIERS["tiers"]})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tiers.yaml"
    file.write_text(yaml.safe_dump(TIERS))
    return file


@pytest.fixture
async def stand(redis_client: Redis, path: Path) -> AsyncIterator[Stand]:
    async with running_stand(redis=redis_client, tiers_file=path) as running:
        yield running


def error_of(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["param"], error["code"]


async def test_the_tiers_in_force_are_shown_with_every_default(stand: Stand, path: Path) -> None:
    shown = (await stand.http.get("/admin/tiers")).json()
    assert shown["source"] == str(path)
    assert shown["parts"] == [{"part": "gateway 1", "generation": shown["generation"]}]
    assert shown["document"]["tiers"]["bulk"]["retry"] == {"max_attempts": 4, "max_preemptions": 3}
    answer = await stand.post("/admin/tiers", shown["document"])
    assert answer.status_code == 200, "the shown document can be sent back"


@pytest.mark.parametrize("kind", ["application/json", "application/yaml", "text/yaml; charset=utf-8"])
async def test_tiers_that_are_sent_are_in_force_for_the_next_request(stand: Stand, kind: str) -> None:
    tiers = changed(realtime=7)
    tiers["tiers"]["batch"]["service_tiers"] = ["scale"]
    body = yaml.safe_dump(tiers) if "yaml" in kind else httpx.Request("POST", "/", json=tiers).content
    answer = await stand.http.post("/admin/tiers", content=body, headers={"content-type": kind})
    assert answer.json() | {"generation": 0} == {
        "changed": True,
        "generation": 0,
        "source": "POST /admin/tiers",
        "parts": ["gateway 1"],
    }
    assert stand.gateway.tiers["realtime"].queue_limit == 7
    ask = [{"role": "user", "content": "hi"}]
    served = await stand.post("/v1/chat/completions", {"model": "alias", "messages": ask, "service_tier": "scale"})
    assert served.json()["service_tier"] == "scale"
    assert stand.worker.served[-1].tier == "batch"


async def test_the_file_is_read_again(stand: Stand, path: Path) -> None:
    path.write_text(yaml.safe_dump(changed(realtime=5)))
    assert (await stand.http.post("/admin/tiers/reload")).json()["changed"]
    assert stand.gateway.tiers["realtime"].queue_limit == 5
    assert not (await stand.http.post("/admin/tiers/reload")).json()["changed"]
    path.write_text(yaml.safe_dump(changed(realtime=-5)))
    refused = await stand.http.post("/admin/tiers/reload")
    assert error_of(refused) == (400, "tiers.realtime.queue_limit", "invalid_tiers")
    path.unlink()
    assert error_of(await stand.http.post("/admin/tiers/reload")) == (400, None, "invalid_tiers")
    assert stand.gateway.tiers["realtime"].queue_limit == 5


@pytest.mark.parametrize(
    ("kind", "body", "param", "code"),
    [
        ("application/json", "{", None, "invalid_json"),
        ("application/json", "[]", None, "invalid_type"),
        ("application/json", "{}", "default_tier", "invalid_tiers"),
        ("application/yaml", "a: [", None, "invalid_yaml"),
        ("application/yaml", "tiers: {}\ntiers: {}", None, "invalid_yaml"),
        ("application/yaml", "tiers: 2024-13-45", None, "invalid_yaml"),
        ("application/yaml", "- a", None, "invalid_tiers"),
        ("application/yaml", yaml.safe_dump({**TIERS, "batch_tier": "none"}), "batch_tier", "invalid_tiers"),
        ("application/yaml", yaml.safe_dump({**TIERS, "extra": 1}), "extra", "invalid_tiers"),
    ],
)
async def test_a_bad_document_is_refused_by_its_key(
    stand: Stand, kind: str, body: str, param: str | None, code: str
) -> None:
    before = (await stand.http.get("/admin/tiers")).json()
    answer = await stand.http.post("/admin/tiers", content=body, headers={"content-type": kind})
    assert error_of(answer) == (400, param, code)
    assert (await stand.http.get("/admin/tiers")).json() == before


async def test_a_tier_with_waiting_requests_is_not_removed(stand: Stand) -> None:
    without = {**changed(), "tiers": {n: t for n, t in changed()["tiers"].items() if n != "bulk"}}
    stand.worker.claims = False
    body = {"model": "alias", "messages": [{"role": "user", "content": "hi"}], "service_tier": "flex"}
    waiting = asyncio.create_task(stand.post("/v1/chat/completions", body))
    await until(lambda: stand.waiting == 1)
    answer = await stand.post("/admin/tiers", without)
    assert error_of(answer) == (409, None, "tiers_refused")
    assert "'bulk' cannot be removed: 1 request waits in its queue" in answer.json()["error"]["message"]
    stand.worker.claim_again()
    assert (await stand.post("/admin/tiers", changed(bulk=9))).status_code == 200
    assert (await waiting).json()["service_tier"] == "flex"


async def test_a_tier_that_a_key_names_is_not_removed(redis_client: Redis, path: Path) -> None:
    keyring = Keyring([key("root", role="admin"), key("chat-ui", tiers=frozenset({"bulk"}))])
    without = {**changed(), "tiers": {n: t for n, t in changed()["tiers"].items() if n != "bulk"}}
    async with running_stand(redis=redis_client, tiers_file=path, keyring=keyring) as stand:
        answer = await stand.post("/admin/tiers", without, headers=as_("root"))
        assert error_of(answer) == (409, None, "tiers_refused")
        assert "The API key 'chat-ui' names the tier 'bulk'." in answer.json()["error"]["message"]


@pytest.mark.parametrize(("in_force", "said"), [(True, "do not have them yet"), (False, "Nothing has changed")])
def test_parts_that_did_not_confirm_are_named(in_force: bool, said: str) -> None:
    with pytest.raises(ApiError) as refusal:
        describe_change(Late(("worker a", "worker b"), in_force))
    assert (refusal.value.status, refusal.value.code) == (503, "tiers_not_applied")
    assert "worker a, worker b" in refusal.value.message
    assert said in refusal.value.message
    assert refusal.value.headers["retry-after"] == "5"


CAPACITY = TierCapacity(step_s=0.01, slots_free=64, prefill_tokens_per_s=1000.0, output_tokens_per_s=1000.0)


@pytest.mark.parametrize(("capacity", "predicted"), [(None, []), (CAPACITY, ["realtime"])])
async def test_each_worker_explains_itself(capacity: TierCapacity | None, predicted: list[str]) -> None:
    async with running_stand(capacity=capacity) as stand:
        [status] = await stand.worker.registry.workers()
        await stand.worker.registry.announce(status, '{"tiers":{"realtime":{"knobs":[]}}}')
        explained = (await stand.http.get("/admin/sla")).json()
        assert explained["workers"] == [{"id": "w1", "tiers": {"realtime": {"knobs": []}}}]
        assert list(explained["predicted_ttft_s"]) == predicted
        assert all(0.01 <= seconds < 0.1 for seconds in explained["predicted_ttft_s"].values())


# What administrators get at each place; None: a stream that does not end.
PLACES = {
    ("GET", "tiers"): 200,
    ("POST", "tiers"): 400,  # without a body
    ("POST", "tiers/reload"): 200,
    ("GET", "sla"): 200,
    ("GET", "sla/stream"): None,
    ("GET", "overview"): 200,
    ("GET", "keys"): 200,
    ("GET", "usage"): 200,
    ("GET", "dead-letters"): 200,
    ("POST", "dead-letters/x/retry"): 404,
    ("DELETE", "dead-letters/x"): 404,
}


async def test_keys_need_to_be_administrators() -> None:
    async with running_stand(keyring=Keyring([key("root", role="admin"), key("user")])) as stand:
        for (method, place), status in PLACES.items():
            ask = partial(stand.http.request, method, f"/admin/{place}")
            assert error_of(await ask()) == (401, None, "invalid_api_key")
            refused = await ask(headers=as_("user"))
            assert error_of(refused) == (403, None, "insufficient_permissions")
            assert "admin: true" in refused.json()["error"]["message"]
            assert status is None or (await ask(headers=as_("root"))).status_code == status, place


MAY = {"reader": {"GET"}, "operator": {"GET", "dead-letters"}, "root": {"GET", "dead-letters", "tiers", "keys"}}


async def test_each_role_may_what_the_lower_ones_may_and_more() -> None:
    """Every endpoint of /admin, of those that FastAPI knows: a new one that changes something must name its role."""
    roles = [key("reader", role="read"), key("operator", role="operate"), key("root", role="admin"), key("user")]
    async with running_stand(keyring=Keyring(roles)) as stand:
        routes = [
            (method, path.replace("{letter_id}", "x"))
            for path, item in (await stand.http.get("/openapi.json")).json()["paths"].items()
            for method in map(str.upper, item)
            if path.startswith("/admin/") and not path.endswith("/stream")
        ]
        assert {method for method, _ in routes} == {"GET", "POST", "DELETE"}
        for method, path in routes:
            kind = method if method == "GET" else path.split("/")[2]
            for name in ("user", *MAY):
                answer = await stand.http.request(method, path, headers=as_(name))
                is_refused = kind not in MAY.get(name, ())
                assert (answer.status_code == 403) == is_refused, (name, method, path)


async def test_new_tiers_are_those_of_the_next_request() -> None:
    async with running_stand() as stand:
        tiers = make_tiers(batch={"priority": 1})
        GatewayTiers(stand.gateway.client, Keyring()).reconfigure(tiers)
        assert stand.gateway.tiers is tiers


BOMB = b"x0: &x0 {a: 1, b: 2}\n" + b"".join(
    b"x%d: &x%d\n  <<: [%s]\n" % (i, i, b",".join([b"*x%d" % (i - 1)] * 9)) for i in range(1, 9)
)


@pytest.mark.parametrize("body", [BOMB, b"a: &a [1]\nb: [*a, *a]", b"&a [*a]"], ids=["merges", "aliases", "a loop"])
async def test_yaml_with_aliases_is_refused_at_once(stand: Stand, body: bytes) -> None:
    async with asyncio.timeout(30):  # with merges, these lines would take minutes
        answer = await stand.http.post("/admin/tiers", content=body, headers={"content-type": "application/yaml"})
    assert error_of(answer) == (400, None, "invalid_yaml")


@pytest.mark.parametrize("kind", ["application/yaml", "application/json"])
async def test_a_large_document_is_refused(stand: Stand, kind: str) -> None:
    answer = await stand.http.post("/admin/tiers", content=b"[" + b" " * 2**16 + b"]", headers={"content-type": kind})
    assert answer.status_code == 413
