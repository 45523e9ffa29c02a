"""Batches through the whole gateway: the real app and completion service, on the memory queue and a scripted worker."""

import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from gateway.app import create_app
from gateway.files.store import FileStore
from gateway.identity import ApiKey, Keyring
from gateway.jobs.batches.service import BatchService
from scheduler.clock import SystemClock
from scheduler.request import UPSTREAM_REFUSED, EventKind, Request, TokenEvent
from tests.gateway.offline import jsonl
from tests.gateway.stand import MODEL, Stand, make_tiers, running_stand, text_of, token_by_token, token_ids
from tests.waiting import until


def repeat(request: Request) -> Sequence[TokenEvent]:
    """Answer with the nonce in the question."""
    prompt = text_of(request.prompt_token_ids)
    return token_by_token(request, token_ids(prompt.split("Repeat: ")[1].split("<")[0].strip()))


def ask(nonce: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Repeat: {nonce}"}], **more}
    return {"custom_id": nonce, "method": "POST", "url": "/v1/chat/completions", "body": body}


@asynccontextmanager
async def offline_tier(
    stand: Stand, redis: Redis, data_dir: Path, keyring: Keyring | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Return an HTTP client of the stand's gateway, with files and batches."""
    whole, clock = stand.gateway, SystemClock()
    files = FileStore(redis, data_dir, clock)
    batches = BatchService(redis, files, whole.completions, whole.tiers, whole.model_names, clock)
    gateway = dataclasses.replace(whole, files=files, batches=batches, keyring=keyring or whole.keyring)
    await batches.start()
    transport = httpx.ASGITransport(create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1") as http:
        yield http
    await batches.close()


async def submit(http: httpx.AsyncClient, entries: list[dict[str, Any]]) -> str:
    upload = {"file": ("in.jsonl", jsonl(entries))}
    file = (await http.post("/files", files=upload, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str((await http.post("/batches", json=body)).json()["id"])


async def ended(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}

    async def over() -> bool:
        batch.update((await http.get(f"/batches/{batch_id}")).json())
        return batch["status"] in ("completed", "failed", "cancelled", "expired")

    await until(over)
    return batch


async def read(http: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    content = await http.get(f"/files/{file_id}/content")
    return [json.loads(text) for text in content.text.splitlines()]


async def test_every_line_gets_its_own_answer_though_the_queue_is_short(redis_client: Redis, tmp_path: Path) -> None:
    tiers = make_tiers(batch={"queue_limit": 16})
    nonces = [f"n{n}x{n * n}" for n in range(100)]
    entries = [ask(nonce) for nonce in nonces] + [ask("long " * 400), ask("hot", temperature=9)]
    async with running_stand(repeat, tiers=tiers) as stand, offline_tier(stand, redis_client, tmp_path) as http:
        batch = await ended(http, await submit(http, entries))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 102, "completed": 100, "failed": 2}
        output = await read(http, batch["output_file_id"])
        errors = await read(http, batch["error_file_id"])
        assert stand.waiting == 0
    answers = {e["custom_id"]: e["response"]["body"]["choices"][0]["message"]["content"] for e in output}
    assert answers == {nonce: nonce for nonce in nonces}
    assert {e["response"]["body"]["service_tier"] for e in output} == {"flex"}
    assert {request.tier for request in stand.worker.served} == {"batch"}
    faults = {e["custom_id"]: e["response"]["body"]["error"] for e in errors}
    assert faults["long " * 400]["code"] == "context_length_exceeded"
    assert faults["hot"]["param"] == "temperature"
    usage = [e["response"]["body"]["usage"] for e in output]
    assert batch["usage"]["output_tokens"] == sum(u["completion_tokens"] for u in usage)
    assert batch["usage"]["input_tokens"] == sum(u["prompt_tokens"] for u in usage)


async def test_a_line_that_the_models_server_refuses_is_answered_with_its_words(
    redis_client: Redis, tmp_path: Path
) -> None:
    def refuse(request: Request) -> Sequence[TokenEvent]:
        said = "The model's server answered 400: no such stop word"
        return [TokenEvent(request.id, EventKind.FAILED, error=said, code=UPSTREAM_REFUSED)]

    async with running_stand(refuse) as stand, offline_tier(stand, redis_client, tmp_path) as http:
        batch = await ended(http, await submit(http, [ask("a")]))
        [line] = await read(http, batch["error_file_id"])
        chat = await stand.post("/v1/chat/completions", ask("a")["body"])
        assert len(stand.worker.served) == 2, "the line is not tried again"
    assert line["response"]["status_code"] == chat.status_code == 400
    for error in (line["response"]["body"]["error"], chat.json()["error"]):
        assert (error["type"], error["code"]) == ("invalid_request_error", UPSTREAM_REFUSED)
        assert "no such stop word" in error["message"]


async def test_cancelling_a_batch_frees_its_generations(redis_client: Redis, tmp_path: Path) -> None:
    async with running_stand(repeat) as stand, offline_tier(stand, redis_client, tmp_path) as http:
        stand.worker.gate.clear()
        batch_id = await submit(http, [ask(f"n{n}") for n in range(20)])
        await until(lambda: len(stand.worker.served) == 20)
        assert (await http.post(f"/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
        assert (await ended(http, batch_id))["request_counts"] == {"total": 20, "completed": 0, "failed": 0}
        await until(lambda: len(stand.worker.cancelled) == 20)
        await until(lambda: stand.waiting == 0)


async def test_the_offline_routes_ask_for_a_key(redis_client: Redis, tmp_path: Path) -> None:
    keyring = Keyring([ApiKey("team", hashlib.sha256(b"sk-secret").digest())])
    async with (
        running_stand() as stand,
        offline_tier(stand, redis_client, tmp_path, keyring) as http,
    ):
        for method, path in (("GET", "/files"), ("POST", "/files"), ("GET", "/batches"), ("POST", "/batches")):
            assert (await http.request(method, path)).status_code == 401
        answer = await http.get("/files", headers={"Authorization": "Bearer sk-secret"})
        assert answer.status_code == 200 and answer.headers["x-request-id"].startswith("req_")
