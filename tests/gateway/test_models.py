"""Several models at one door: which one a request means, and that each has queues, workers and tiers of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.identity import Keyring
from gateway.models import _share_of
from scheduler.config import TierSet, parse_tiers
from scheduler.store import connection
from scheduler.store.address import of_model
from scheduler.store.keys import Keys
from tests.gateway.api_keys import as_, key
from tests.gateway.offline import jsonl
from tests.gateway.second_model import OTHER, Second, second_model
from tests.gateway.stand import Stand, make_tiers, running_stand, store_url
from tests.gateway.tiny_model import MODEL
from tests.waiting import until

SPLITS = {"mix": {MODEL: 1, OTHER: 1}}
MESSAGES = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def two_models(
    redis: Redis,
    *,
    tiers: TierSet | None = None,
    fallback: str | None = None,
    second_works: bool = True,
    **options: Any,
) -> AsyncIterator[tuple[Stand, Second]]:
    own = connection.connect(of_model(store_url(), OTHER))
    second = second_model(own, tiers or make_tiers(), fallback)
    if second_works:
        await second.worker.announce()
    running = asyncio.create_task(second.worker.run())
    try:
        async with running_stand("From the first.", redis=redis, more_models=[second.source], **options) as stand:
            yield stand, second
    finally:
        running.cancel()
        await second.worker.stop()
        await own.aclose()


async def ask(stand: Stand, model: str, **more: Any) -> tuple[httpx.Response, str]:
    """Return the answer of a chat, and its text."""
    headers = more.pop("headers", None)
    answer = await stand.post("/v1/chat/completions", {"model": model, "messages": MESSAGES, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer, answer.json()["choices"][0]["message"]["content"]


async def run_batch(stand: Stand, model: str, num_lines: int) -> dict[str, Any]:
    """Return the record of a batch when it has ended."""
    body = {"model": model, "messages": MESSAGES}
    kind = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    upload = {"file": ("in.jsonl", jsonl([{"custom_id": str(n), **kind} for n in range(num_lines)]))}
    file = (await stand.http.post("/v1/files", files=upload, data={"purpose": "batch"})).json()
    new = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await stand.post("/v1/batches", new)).json()

    async def is_over() -> bool:
        batch.update((await stand.http.get(f"/v1/batches/{batch['id']}")).json())
        return batch["status"] in ("completed", "failed", "expired")

    await until(is_over)
    return dict(batch)


async def test_a_request_is_answered_by_the_model_that_it_names(redis_client: Redis) -> None:
    async with two_models(redis_client) as (stand, second):
        for name, text in {MODEL: "From the first.", OTHER: "From the second.", "o": "From the second."}.items():
            answer, said = await ask(stand, name)
            assert (said, answer.json()["model"]) == (text, name)
            assert "x-tidegate-model" not in answer.headers
        listed = (await stand.http.get("/v1/models")).json()["data"]
        unknown = await stand.post("/v1/chat/completions", {"model": "neither", "messages": MESSAGES})
        assert (await ask(stand, ""))[1] == "From the first.", "a request without a model means the first one"
    assert {entry["id"]: entry["root"] for entry in listed} == {MODEL: MODEL, "alias": MODEL, OTHER: OTHER, "o": OTHER}
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert [(request.tier, request.vocabulary) for request in second.worker.served] == [("realtime", "v2")] * 2


async def test_every_api_follows_the_model(redis_client: Redis) -> None:
    async with two_models(redis_client) as (stand, _):
        response = await stand.client.responses.create(model=OTHER, input="hi")
        body = {"model": OTHER, "max_tokens": 9, "messages": MESSAGES}
        message = (await stand.post("/v1/messages", body)).json()
        text = await stand.client.completions.create(model=OTHER, prompt="hi")
        counted = await stand.post("/v1/messages/count_tokens", body)
        tokens = await stand.post("/tokenize", {"model": OTHER, "prompt": "hi"})
        back = await stand.post("/detokenize", {"model": OTHER, "tokens": tokens.json()["tokens"]})
        compact = await stand.post("/v1/responses/compact", {"model": OTHER, "input": "hi"})
    assert (response.output_text, message["content"][0]["text"]) == ("From the second.", "From the second.")
    assert text.choices[0].text == "From the second." and (response.model, message["model"]) == (OTHER, OTHER)
    assert [answer.status_code for answer in (counted, tokens, back, compact)] == [200] * 4
    assert back.json()["prompt"] == "hi"


async def test_the_lines_of_a_batch_go_to_their_model(redis_client: Redis, tmp_path: Path) -> None:
    async with two_models(redis_client, data_dir=tmp_path) as (stand, second):
        await run_batch(stand, OTHER, 20)
        assert {request.tier for request in second.worker.served} == {"batch"}
    assert len(second.worker.served) == 20 and not stand.worker.served


async def test_a_batch_of_a_split_is_by_its_key_in_the_models_own_batch_tier(
    redis_client: Redis, tmp_path: Path
) -> None:
    tiers = parse_tiers(make_tiers().document(defaults=False) | {"batch_tier": "bulk"})
    splits = {"mix": {MODEL: 0, OTHER: 1}}
    async with two_models(redis_client, data_dir=tmp_path, tiers=tiers, splits=splits) as (stand, second):
        batch = await run_batch(stand, "mix", 3)
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [request.tier for request in second.worker.served] == ["bulk"] * 3


async def test_a_batch_without_a_key_is_answered_by_one_model_of_a_split(redis_client: Redis, tmp_path: Path) -> None:
    async with two_models(redis_client, data_dir=tmp_path, splits=SPLITS) as (stand, second):
        await run_batch(stand, "mix", 20)
        assert {len(stand.worker.served), len(second.worker.served)} == {0, 20}


async def test_a_split_gives_a_sender_always_the_same_model(redis_client: Redis) -> None:
    async with two_models(redis_client, splits=SPLITS) as (stand, _):
        by_user = {f"u{n}": (await ask(stand, "mix", user=f"u{n}"))[0] for n in range(12)}
        again = {user: (await ask(stand, "mix", user=user))[0].json()["model"] for user in by_user}
        models = {user: answer.json()["model"] for user, answer in by_user.items()}
        assert models == again and set(models.values()) == {MODEL, OTHER}
        for user, answer in by_user.items():
            assert answer.headers["x-tidegate-model"] == models[user]
        counted = [
            stand.metric("tidegate_model_choices_total", asked="mix", model=m, why="split") for m in SPLITS["mix"]
        ]
        assert sum(counted) == 24 and min(counted) > 0


async def test_a_split_without_a_user_is_by_key(redis_client: Redis) -> None:
    keyring = Keyring([key(f"k{n}") for n in range(8)])
    async with two_models(redis_client, splits=SPLITS, keyring=keyring) as (stand, _):
        models = [
            {(await ask(stand, "mix", headers=as_(f"k{n}")))[0].json()["model"] for _ in range(3)} for n in range(8)
        ]
    assert {len(of_key) for of_key in models} == {1} and len(set.union(*models)) == 2


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 9, "b": 1}, {"a": 50, "b": 30, "c": 20}, {"a": 1, "b": 0}])
def test_ten_thousand_senders_are_split_within_a_point(weights: dict[str, int]) -> None:
    found = [_share_of("mix", weights, f"sender {n}") for n in range(10_000)]
    for model, weight in weights.items():
        assert found.count(model) / 10_000 == pytest.approx(weight / sum(weights.values()), abs=0.01)


async def test_a_declared_fallback_answers_without_workers_and_says_so(redis_client: Redis) -> None:
    async with two_models(redis_client, fallback=MODEL, second_works=False) as (stand, second):
        answer, said = await ask(stand, OTHER)
        assert (said, answer.json()["model"]) == ("From the first.", MODEL)
        assert answer.headers["x-tidegate-model"] == MODEL
        assert stand.metric("tidegate_model_choices_total", asked=OTHER, model=MODEL, why="fallback") == 1
        wanted = (await stand.http.get(f"/admin/scale?model={OTHER}")).json()
        assert wanted["workers_wanted"] == 1, "somebody asked for it"
        await second.worker.announce()
        await until(lambda: bool(stand.gateway.models.of(OTHER).client.live.engines))
        assert (await ask(stand, OTHER))[1] == "From the second."


async def test_the_lines_of_a_batch_wait_for_their_own_model(redis_client: Redis, tmp_path: Path) -> None:
    async with two_models(redis_client, fallback=MODEL, second_works=False, data_dir=tmp_path) as (stand, second):
        running = asyncio.create_task(run_batch(stand, OTHER, 3))
        client = stand.gateway.models.of(OTHER).client
        await until(lambda: client.wait.was_asked)
        await second.worker.announce()
        assert (await running)["request_counts"]["completed"] == 3
    assert len(second.worker.served) == 3 and not stand.worker.served


async def test_a_fallback_without_workers_does_not_answer_either(redis_client: Redis) -> None:
    async with two_models(redis_client, fallback=MODEL, second_works=False, with_worker=False) as (stand, _):
        refused = await stand.post("/v1/chat/completions", {"model": OTHER, "messages": MESSAGES})
    assert refused.status_code == 503 and "x-tidegate-model" not in refused.headers


async def test_all_models_drain_and_share_the_store(redis_client: Redis) -> None:
    async with two_models(redis_client, store_mb=64) as (stand, _):
        clients = stand.gateway.clients
        assert len(clients) == 2 and {client._queue_bytes for client in clients} == {8 * 2**20}
        stand.gateway.drain()
        assert all(client.is_draining for client in clients)


async def test_without_a_declared_fallback_nobody_else_answers(redis_client: Redis) -> None:
    async with two_models(redis_client, second_works=False) as (stand, _):
        refused = await stand.post("/v1/chat/completions", {"model": OTHER, "messages": MESSAGES})
        ready = (await stand.http.get("/ready")).json()
        assert (await ask(stand, MODEL))[1] == "From the first."
    assert refused.status_code == 503
    assert ready["ready"] and ready["models"] == {MODEL: True, OTHER: False}


async def test_a_full_queue_of_one_model_refuses_nobody_of_the_other(redis_client: Redis) -> None:
    tiers = make_tiers(realtime={"queue_limit": 2})
    async with two_models(redis_client, tiers=tiers) as (stand, second):
        second.worker.gate.clear()
        second.worker.claims = False
        flood = [
            asyncio.create_task(stand.post("/v1/chat/completions", {"model": OTHER, "messages": MESSAGES, "n": 2}))
        ]
        await until(lambda: stand.gateway.models.of(OTHER).client.num_open == 2)
        refused = await stand.post("/v1/chat/completions", {"model": OTHER, "messages": MESSAGES})
        assert (await ask(stand, MODEL))[1] == "From the first."
        page = (await stand.http.get("/metrics")).text
        second.worker.claim_again()
        second.worker.gate.set()
        assert (await asyncio.gather(*flood))[0].status_code == 200
    assert refused.status_code == 503
    assert 'tidegate_queued_tokens{kind="prompt",model="other",tier="realtime"}' in page
    assert f'tidegate_workers_alive{{model="{MODEL}"}} 1.0' in page


async def test_models_with_names_leave_the_common_queues_to_static_endpoints(redis_client: Redis) -> None:
    async with two_models(redis_client, has_own_queues=True) as (stand, _):
        assert len(stand.gateway.clients) == 3
        assert [(await ask(stand, name))[1] for name in (MODEL, OTHER)] == ["From the first.", "From the second."]
        main = stand.gateway.models.main
        main.client.reconfigure(make_tiers(night={"priority": -1}))
        assert stand.gateway.key_source._tiers() is main.tiers, "keys are checked against the tiers in force"


async def test_operators_ask_for_one_model(redis_client: Redis) -> None:
    async with two_models(redis_client, tiers=make_tiers(realtime={"queue_limit": 7})) as (stand, _):
        tiers = (await stand.http.get(f"/admin/tiers?model={OTHER}")).json()["document"]["tiers"]
        own = (await stand.http.get("/admin/tiers")).json()["document"]["tiers"]
        shown = [(await stand.http.get(f"/admin/overview?model={name}")).json() for name in (MODEL, OTHER)]
        unknown = await stand.http.get("/admin/scale?model=neither")
    assert (tiers["realtime"]["queue_limit"], own["realtime"]["queue_limit"]) == (7, 64)
    assert [(view["model"], view["models"]) for view in shown] == [(MODEL, [MODEL, OTHER]), (OTHER, [MODEL, OTHER])]
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("redis://h:1/0", "tidegate:"),
        ("redis://h:1/0?model=org/a b:{c}", "tidegate:model:org%2Fa%20b%3A%7Bc%7D:"),
        ("redis://h:1?deployment=x&model=a", "x:model:a:"),
        ("redis+cluster://h:1?model=a", "{tidegate:model:a}:"),
    ],
)
def test_each_model_has_keys_of_its_own(url: str, prefix: str) -> None:
    assert Keys.of(connection.connect(url)).prefix == prefix
