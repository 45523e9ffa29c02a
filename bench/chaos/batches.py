"""Batches during the faults, through any gateway: submitted until they are acknowledged, awaited, and judged.

Knows OpenAI's API and what each line must answer; does not know faults.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from loadtest.client.http import TargetError

MODEL = "tidegate-demo"
KEY = "Idempotency-Key"
MAX_RECHECKED = 5  # lines of a batch; the model gets about one in a thousand wrong
BATCH_POLL_S = 0.25


@dataclass(slots=True)
class BatchWork:
    nonces: list[str]
    batch_id: str = ""
    problem: str = "not finished"


@dataclass(slots=True)
class Gateways:
    """The gateways, asked in turn. Requests that must succeed are sent until they do."""

    urls: Mapping[str, str]  # of each gateway
    _turn: int = 0

    def url(self) -> str:
        """Return the address of the next gateway in turn."""
        self._turn += 1
        return list(self.urls.values())[self._turn % len(self.urls)]

    async def until_json(self, http: httpx.AsyncClient, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = (await self._until(http, method, path, **options)).json()
        return answer

    async def _until(self, http: httpx.AsyncClient, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request to any gateway until it is answered with 200. Raises `TargetError` if it is wrong."""
        while True:
            try:
                reply = await http.request(method, self.url() + path, **options)
                if reply.status_code == 200:
                    return reply
                if reply.status_code in (400, 422):
                    raise TargetError(f"{method} {path} was refused: {reply.text[:200]}")
            except httpx.HTTPError:
                pass
            await asyncio.sleep(BATCH_POLL_S)

    async def try_json(self, http: httpx.AsyncClient, method: str, path: str) -> dict[str, Any] | None:
        try:
            reply = await http.request(method, self.url() + path)
        except httpx.HTTPError:
            return None
        answer: dict[str, Any] | None = reply.json() if reply.status_code == 200 else None
        return answer

    async def submit_lines(
        self, http: httpx.AsyncClient, name: str, lines: Sequence[Mapping[str, Any]], endpoint: str
    ) -> str:
        """Upload lines and create a batch of them, each until it is acknowledged, with a key against doubles.

        Return the batch's id. `name` is new for each batch.
        """
        content = "\n".join(json.dumps(line) for line in lines).encode()
        upload = {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}
        file = await self.until_json(http, "POST", "/v1/files", **upload, headers={KEY: f"{name}-file"})
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = await self.until_json(http, "POST", "/v1/batches", json=body, headers={KEY: f"{name}-batch"})
        return str(batch["id"])

    async def batch(self, http: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
        return await self.until_json(http, "GET", f"/v1/batches/{batch_id}")

    async def output_of(self, http: httpx.AsyncClient, batch_id: str) -> list[dict[str, Any]]:
        """Return the records of the output file and of the error file of a batch that has completed."""
        batch = await self.batch(http, batch_id)
        files = [file_id for file_id in (batch["output_file_id"], batch["error_file_id"]) if file_id is not None]
        contents = [await self._until(http, "GET", f"/v1/files/{file_id}/content") for file_id in files]
        return [json.loads(line) for content in contents for line in content.text.splitlines()]

    async def judge(self, http: httpx.AsyncClient, work: BatchWork) -> str:
        """Wait until the batch has ended. Return what is wrong with it; an empty text if nothing is."""
        if not work.batch_id:
            return "never acknowledged"
        while (batch := await self.batch(http, work.batch_id))["status"] != "completed":
            if batch["status"] not in ("validating", "in_progress", "finalizing"):
                return f"its status is {batch['status']}"
            await asyncio.sleep(BATCH_POLL_S)
        if batch["output_file_id"] is None:
            return f"no output: {batch['request_counts']}"
        content = await self._until(http, "GET", f"/v1/files/{batch['output_file_id']}/content")
        records = [json.loads(line) for line in content.text.splitlines()]
        answers = dict(zip(work.nonces, work.nonces, strict=True))
        for nonce in wrong_lines(work.nonces, records):
            answers[nonce] = await self.says(http, nonce)
        return judge_lines([answers[nonce] for nonce in work.nonces], records)

    async def says(self, http: httpx.AsyncClient, nonce: str) -> str:
        """Return what the model answers to a nonce without any fault."""
        body = await self.until_json(http, "POST", "/v1/chat/completions", json=chat_body(nonce))
        answer: str = body["choices"][0]["message"]["content"]
        return answer


def judge_lines(nonces: list[str], records: list[dict[str, Any]]) -> str:
    """Return what is wrong with the output lines of a batch; an empty text if each line is there once and right."""
    answers: dict[str, str] = {}
    for record in records:
        if record["custom_id"] in answers:
            return f"{record['custom_id']} is there twice"
        answers[record["custom_id"]] = record["response"]["body"]["choices"][0]["message"]["content"]
    expected = {f"line-{i}": nonce for i, nonce in enumerate(nonces)}
    wrong = [f"{name}: {answers.get(name)!r}" for name in expected if answers.get(name) != expected[name]]
    if wrong or len(answers) != len(expected):
        return f"{len(wrong)} of {len(expected)} lines are missing or wrong, {len(answers)} are there: {wrong[:3]}"
    return ""


def wrong_lines(nonces: list[str], records: list[dict[str, Any]]) -> list[str]:
    """Return the nonces of some lines whose answers are others."""
    answers = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in records}
    return [nonce for i, nonce in enumerate(nonces) if answers.get(f"line-{i}", nonce) != nonce][:MAX_RECHECKED]


def chat_body(nonce: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Repeat: {nonce}"}
    return {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 48, **more}
