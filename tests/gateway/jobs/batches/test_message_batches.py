"""Batches in the words of Anthropic's Message Batches API, over the whole gateway."""

import json
from typing import Any

import httpx
import pytest

from gateway.identity import Keyring
from scheduler.request import EventKind, Request, TokenEvent
from tests.gateway.api_keys import as_, key
from tests.gateway.jobs.batches.test_completions import repeat
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL, token_ids
from tests.waiting import until

BATCHES = "/v1/messages/batches"


def ask(nonce: str, **more: Any) -> dict[str, Any]:
    params = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": f"Repeat: {nonce}"}], **more}
    return {"custom_id": nonce, "params": params}


async def ended(http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}

    async def over() -> bool:
        batch.update((await http.get(f"{BATCHES}/{batch_id}")).json())
        return bool(batch["processing_status"] == "ended")

    await until(over)
    return batch


async def results_of(http: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    answer = await http.get(batch["results_url"])
    found = [json.loads(line) for line in answer.text.splitlines()]
    return {line["custom_id"]: line["result"] for line in found}


async def created(stand: Stand, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    answer = await stand.post(BATCHES, {"requests": requests}, **more)
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


async def test_a_batch_from_its_requests_to_its_results() -> None:
    async with running_stand(repeat) as stand:
        requests = [ask("a"), ask("b"), ask("c", temperature=9), ask("d", service_tier="standard_only")]
        batch = await created(stand, requests)
        assert (batch["type"], batch["processing_status"], batch["results_url"]) == (
            "message_batch",
            "in_progress",
            None,
        )
        assert batch["request_counts"]["processing"] == 4
        batch = await ended(stand.http, batch["id"])
        results = await results_of(stand.http, batch)
        head = await stand.http.head(batch["results_url"])
        assert (head.status_code, head.headers["content-type"], head.content) == (200, "application/x-jsonl", b"")
        whole = (await stand.http.get(f"/v1/batches/{batch['id']}")).json()
    counts = {"processing": 0, "succeeded": 3, "errored": 1, "canceled": 0, "expired": 0}
    assert batch["request_counts"] == counts and batch["ended_at"].endswith("Z")
    message = results["a"]["message"]
    assert (results["a"]["type"], message["content"]) == ("succeeded", [{"type": "text", "text": "a"}])
    assert message["usage"]["service_tier"] == "batch"
    fault = results["c"]["error"]
    assert (results["c"]["type"], fault["type"]) == ("errored", "error")
    assert fault["error"]["type"] == "invalid_request_error" and "'temperature'" in fault["error"]["message"]
    assert whole["endpoint"] == "/v1/messages"
    assert whole["usage"]["output_tokens"] == 3 and whole["usage"]["input_tokens"] > 3


async def test_cached_tokens_of_messages_are_counted() -> None:
    def script(request: Request) -> list[TokenEvent]:
        return [TokenEvent(request.id, EventKind.FINISHED, 0, token_ids("a"), None, cached_tokens=8)]

    async with running_stand(script) as stand:
        batch = await ended(stand.http, (await created(stand, [ask("a")]))["id"])
        used = (await results_of(stand.http, batch))["a"]["message"]["usage"]
        whole = (await stand.http.get(f"/v1/batches/{batch['id']}")).json()["usage"]
    assert whole["input_tokens_details"]["cached_tokens"] == used["cache_read_input_tokens"] == 8
    assert whole["input_tokens"] == used["input_tokens"] + 8


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "'requests'"),
        ([ask("a"), ask("a")], "requests[1]: The custom_id"),
        ([ask("a"), ask("b", model="alias")], "requests[1]: All requests of a batch must use the same model."),
        ([ask("a", model="claude-x")], "requests[0]: The model"),
        ([ask("a", stream=True)], "cannot be streamed"),
        ([ask("a", service_tier="priority")], "service_tier"),
        ([{"custom_id": "a"}], "'requests[0].params'"),
    ],
)
async def test_requests_that_cannot_be_a_batch_are_refused_at_once(requests: Any, words: str) -> None:
    async with running_stand(repeat) as stand:
        answer = await stand.post(BATCHES, {"requests": requests})
        files = (await stand.http.get("/v1/files")).json()["data"]
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer.json()["error"]["message"]
    assert files == []


async def test_a_batch_that_is_cancelled_names_what_it_left() -> None:
    async with running_stand(repeat) as stand:
        stand.worker.gate.clear()
        batch = await created(stand, [ask("a"), ask("b")])
        await until(lambda: stand.waiting == 2)  # its lines have begun
        early = await stand.http.get(f"{BATCHES}/{batch['id']}/results")
        cancelled = (await stand.http.post(f"{BATCHES}/{batch['id']}/cancel")).json()
        batch = await ended(stand.http, batch["id"])
        again = (await stand.http.post(f"{BATCHES}/{batch['id']}/cancel")).json()
        results = await results_of(stand.http, batch)
    assert early.status_code == 400
    assert cancelled["processing_status"] in ("canceling", "ended") and batch["cancel_initiated_at"]
    assert again["processing_status"] == "ended"
    assert batch["request_counts"]["canceled"] == 2
    assert {result["type"] for result in results.values()} == {"canceled"}


async def test_a_deleted_batch_takes_its_files_with_it() -> None:
    async with running_stand(repeat) as stand:
        batch = await ended(stand.http, (await created(stand, [ask("a")]))["id"])
        deleted: dict[str, Any] = {}

        async def gone() -> bool:  # a batch can be deleted when its run is cleared up
            answer = await stand.http.delete(f"{BATCHES}/{batch['id']}")
            deleted.update(answer.json())
            assert answer.status_code in (200, 409)
            return answer.status_code == 200

        await until(gone)
        left = await stand.http.get(f"{BATCHES}/{batch['id']}")
        files = (await stand.http.get("/v1/files")).json()["data"]
    assert (deleted["type"], deleted["id"]) == ("message_batch_deleted", batch["id"])
    assert (left.status_code, left.json()["error"]["type"]) == (404, "not_found_error")
    assert files == []


async def test_pages_have_batches_of_messages_only() -> None:
    async with running_stand(repeat) as stand:
        made = [(await created(stand, [ask(f"n{n}")]))["id"] for n in range(3)]
        first = (await stand.http.get(BATCHES, params={"limit": 2})).json()
        rest = (await stand.http.get(BATCHES, params={"limit": 2, "after_id": first["last_id"]})).json()
        refused = await stand.http.get(BATCHES, params={"before_id": made[0]})
        for batch_id in made:
            await ended(stand.http, batch_id)
    assert [batch["id"] for batch in first["data"] + rest["data"]] == made[::-1]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert refused.status_code == 400 and "'before_id'" in refused.json()["error"]["message"]


async def test_a_key_sees_its_own_batches_only() -> None:
    async with running_stand(repeat, keyring=Keyring([key("ann"), key("bob")])) as stand:
        batch = await created(stand, [ask("a")], headers=as_("ann"))
        theirs = await stand.http.get(f"{BATCHES}/{batch['id']}", headers={"x-api-key": "sk-bob"})
        own = await stand.http.get(f"{BATCHES}/{batch['id']}", headers={"x-api-key": "sk-ann"})
    assert (theirs.status_code, own.status_code) == (404, 200)


async def test_the_same_idempotency_key_makes_one_batch() -> None:
    async with running_stand(repeat) as stand:
        headers = {"idempotency-key": "k"}
        first, second = [await created(stand, [ask("a")], headers=headers) for _ in range(2)]
        await ended(stand.http, first["id"])
    assert first == second
