"""Batches through the whole gateway: the real app and completion service, on the memory queue and a scripted worker."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from scheduler.request import UPSTREAM_REFUSED, EventKind, Request, TokenEvent
from tests.gateway.offline import jsonl
from tests.gateway.scripted_worker import token_by_token
from tests.gateway.stand import make_tiers, running_stand
from tests.gateway.tiny_model import MODEL, text_of, token_ids
from tests.waiting import until


def repeat(request: Request) -> Sequence[TokenEvent]:
    """Answer with the nonce in the question."""
    prompt = text_of(request.prompt_token_ids)
    return token_by_token(request, token_ids(prompt.split("Repeat: ")[1].split("<")[0].strip()))


def ask(nonce: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Repeat: {nonce}"}], **more}
    return {"custom_id": nonce, "method": "POST", "url": "/v1/chat/completions", "body": body}


async def submit(http: httpx.AsyncClient, entries: list[dict[str, Any]], **more: Any) -> str:
    upload = {"file": ("in.jsonl", jsonl(entries))}
    file = (await http.post("/v1/files", files=upload, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"} | more
    return str((await http.post("/v1/batches", json=body)).json()["id"])


async def ended(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}

    async def over() -> bool:
        batch.update((await http.get(f"/v1/batches/{batch_id}")).json())
        return batch["status"] in ("completed", "failed", "cancelled", "expired")

    await until(over)
    return batch


async def read(http: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    content = await http.get(f"/v1/files/{file_id}/content")
    return [json.loads(text) for text in content.text.splitlines()]


async def test_every_line_gets_its_own_answer_though_the_queue_is_short(redis_client: Redis, tmp_path: Path) -> None:
    tiers = make_tiers(batch={"queue_limit": 16})
    nonces = [f"n{n}x{n * n}" for n in range(100)]
    entries = [ask(nonce) for nonce in nonces] + [ask("long " * 400), ask("hot", temperature=9)]
    async with running_stand(repeat, tiers=tiers, redis=redis_client, data_dir=tmp_path) as stand:
        http = stand.http
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

    async with running_stand(refuse, redis=redis_client, data_dir=tmp_path) as stand:
        http = stand.http
        batch = await ended(http, await submit(http, [ask("a")]))
        [line] = await read(http, batch["error_file_id"])
        chat = await stand.post("/v1/chat/completions", ask("a")["body"])
        assert len(stand.worker.served) == 2, "the line is not tried again"
    assert line["response"]["status_code"] == chat.status_code == 400
    for error in (line["response"]["body"]["error"], chat.json()["error"]):
        assert (error["type"], error["code"]) == ("invalid_request_error", UPSTREAM_REFUSED)
        assert "no such stop word" in error["message"]


async def test_cancelling_a_batch_frees_its_generations(redis_client: Redis, tmp_path: Path) -> None:
    async with running_stand(repeat, redis=redis_client, data_dir=tmp_path) as stand:
        http = stand.http
        stand.worker.gate.clear()
        batch_id = await submit(http, [ask(f"n{n}") for n in range(20)])
        await until(lambda: len(stand.worker.served) == 20)
        assert (await http.post(f"/v1/batches/{batch_id}/cancel")).json()["status"] == "cancelling"
        assert (await ended(http, batch_id))["request_counts"] == {"total": 20, "completed": 0, "failed": 0}
        await until(lambda: len(stand.worker.cancelled) == 20)
        await until(lambda: stand.waiting == 0)
