"""/admin/dead-letters: what was given up is listed without its prompt, retried as a new batch, or removed."""

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from gateway.identity import Keyring
from scheduler.request import UNREADABLE_REQUEST, WORKER_DIED, EventKind, Request, TokenEvent
from tests.gateway.api_keys import as_, key
from tests.gateway.in_process import InProcess
from tests.gateway.jobs.batches.test_completions import ask, ended, read, repeat, submit
from tests.gateway.stand import Stand, running_stand
from tests.gateway.tiny_model import MODEL, text_of

REASON = "The request was given up, because its worker died in all of 4 attempts."


class Deadly:
    """A worker's script: prompts with `dies` are given up, as long as they are deadly."""

    def __init__(self) -> None:
        self.is_deadly = True
        self.code = WORKER_DIED
        self.num_given_up = 0

    def __call__(self, request: Request) -> Sequence[TokenEvent]:
        if self.is_deadly and "dies" in text_of(request.prompt_token_ids):
            self.num_given_up += 1
            return [TokenEvent(request.id, EventKind.FAILED, error=REASON, code=self.code)]
        return repeat(request)


@dataclasses.dataclass
class Rig:
    script: Deadly
    stand: Stand
    http: httpx.AsyncClient  # as the key `team`
    admin: httpx.AsyncClient

    async def letters(self) -> list[dict[str, object]]:
        answer = await self.admin.get("/admin/dead-letters")
        assert answer.status_code == 200
        found: list[dict[str, object]] = answer.json()["data"]
        return found


@asynccontextmanager
async def running(redis: Redis, data_dir: Path) -> AsyncIterator[Rig]:
    script = Deadly()
    keyring = Keyring([key("team"), key("root", role="admin")])
    async with running_stand(script, redis=redis, data_dir=data_dir, keyring=keyring) as stand:
        transport = InProcess(stand.app)
        async with (
            httpx.AsyncClient(transport=transport, base_url=stand.url, headers=as_("team")) as http,
            httpx.AsyncClient(transport=transport, base_url=stand.url, headers=as_("root")) as admin,
        ):
            yield Rig(script, stand, http, admin)


@pytest.fixture
async def rig(redis_client: Redis, tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(redis_client, tmp_path) as rig:
        yield rig


async def test_a_line_that_was_given_up_is_in_the_error_file_and_on_the_list(rig: Rig) -> None:
    batch = await ended(rig.http, await submit(rig.http, [ask("one"), ask("dies"), ask("two")]))
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    [error] = await read(rig.http, batch["error_file_id"])
    assert error["custom_id"] == "dies"
    assert error["response"]["body"]["error"]["code"] == WORKER_DIED
    assert error["response"]["body"]["error"]["message"] == REASON
    assert rig.script.num_given_up == 1, "another attempt would end further workers"
    answer = await rig.admin.get("/admin/dead-letters")
    [letter] = answer.json()["data"]
    assert letter["id"] == error["response"]["request_id"]
    assert (letter["tier"], letter["owner"]) == ("batch", "team")
    assert (letter["batch_id"], letter["custom_id"]) == (batch["id"], "dies")
    assert (letter["attempts"], letter["reason"]) == (4, REASON)
    assert "Repeat" not in answer.text
    assert "tidegate_dead_letters 1.0" in (await rig.admin.get("/metrics")).text


async def test_a_retried_line_runs_in_a_new_batch_of_its_owner(rig: Rig) -> None:
    batch = await ended(rig.http, await submit(rig.http, [ask("one"), ask("dies")]))
    [letter] = await rig.letters()
    rig.script.is_deadly = False
    retry = await rig.admin.post(f"/admin/dead-letters/{letter['id']}/retry")
    assert retry.status_code == 202
    again = await ended(rig.http, retry.json()["retry_batch_id"])
    assert (again["status"], again["metadata"]) == ("completed", {"retry_of": batch["id"]})
    [result] = await read(rig.http, again["output_file_id"])
    assert result["custom_id"] == "dies"
    assert await rig.letters() == []
    assert (await rig.admin.post(f"/admin/dead-letters/{letter['id']}/retry")).status_code == 404


async def test_a_line_whose_input_was_deleted_cannot_be_retried(rig: Rig) -> None:
    batch = await ended(rig.http, await submit(rig.http, [ask("dies")]))
    [letter] = await rig.letters()
    assert (await rig.http.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200
    answer = await rig.admin.post(f"/admin/dead-letters/{letter['id']}/retry")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cannot_retry")
    assert "Upload the line again" in answer.json()["error"]["message"]
    assert len(await rig.letters()) == 1


@pytest.mark.parametrize(("stream", "code"), [(False, WORKER_DIED), (True, WORKER_DIED), (False, UNREADABLE_REQUEST)])
async def test_a_chat_that_was_given_up_fails_for_good_and_is_listed(rig: Rig, stream: bool, code: str) -> None:
    rig.script.code = code
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Repeat: dies"}], "stream": stream}
    answer = await rig.http.post("/v1/chat/completions", json=body)
    assert code in answer.text and REASON in answer.text
    if not stream:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    [letter] = await rig.letters()
    assert letter["id"] == answer.headers["x-request-id"]
    assert (letter["owner"], letter["tier"], letter["batch_id"]) == ("team", "realtime", None)
    retry = await rig.admin.post(f"/admin/dead-letters/{letter['id']}/retry")
    assert (retry.status_code, retry.json()["error"]["code"]) == (409, "cannot_retry")
    removed = await rig.admin.delete(f"/admin/dead-letters/{letter['id']}")
    assert removed.json() == {"id": letter["id"], "object": "dead_letter", "deleted": True}
    assert await rig.letters() == []
    assert (await rig.admin.delete(f"/admin/dead-letters/{letter['id']}")).status_code == 404


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "after=unknown"])
async def test_wrong_parameters_are_refused(rig: Rig, query: str) -> None:
    answer = await rig.admin.get(f"/admin/dead-letters?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]
