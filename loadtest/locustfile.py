"""Locust users for the tiers: each user class sends to one tier, as the clients of that tier do.

    locust -f loadtest/locustfile.py --headless -u 50 -r 10 -t 60s --host http://127.0.0.1:8000 --html report.html

RealtimeUser streams short chats. BulkUser sends flex requests one after another without pauses. BatchUser submits JSONL
files and polls for their results. Every prompt holds a nonce, and an answer that is not this nonce counts as a failure.

Locust is a closed loop: it sends less when the server slows down. `python -m loadtest mixed` is an open loop. Before
this file is loaded, Locust replaces `time.sleep` and sockets by those of gevent.
"""

import json
import os
from collections.abc import Iterator
from random import SystemRandom
from string import ascii_letters, digits
from time import perf_counter, sleep
from typing import Any

from locust import HttpUser, between, constant, task

from loadtest.client.answer import AnswerReader, Outcome
from loadtest.client.http import CHAT_PATH

MAX_NONCE_TOKENS = 48  # enough to repeat a nonce with any tokenizer
BATCH_LINES = 10  # requests in one batch
BATCH_TIMEOUT_S, BATCH_POLL_S = 300.0, 1.0  # a batch that takes longer is a failure
TERMINAL = ("completed", "failed", "expired", "cancelled")


def new_nonce() -> str:
    """Return a new nonce. It has no character twice, as those of `loadtest.traffic.prompts.draw_nonces`."""
    drawn = "".join(SystemRandom().sample(ascii_letters + digits, 8))
    return f"{drawn[:4]}-{drawn[4:]}"


class TierUser(HttpUser):  # type: ignore[misc]
    """The base class of the users of all tiers.

    Finds the model's name, sets the API key, and adds entries to the statistics.
    """

    abstract = True

    def on_start(self) -> None:
        if key := os.environ.get("TIDEGATE_API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"
        with self.client.get("/v1/models", catch_response=True) as response:
            models = response.json()["data"] if response.ok else []
            if not models:
                response.failure("the server lists no model")
            self.model = models[0]["id"] if models else ""

    def chat_body(self, nonce: str, **fields: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": f"Repeat: {nonce}"}],
            "max_tokens": MAX_NONCE_TOKENS,
            "temperature": 0,
            **fields,
        }

    def record(self, kind: str, name: str, seconds: float, size: int = 0, problem: str | None = None) -> None:
        """Add an entry to Locust's statistics."""
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=1e3 * seconds,
            response_length=size,
            exception=ValueError(problem) if problem else None,
            context={},
        )


class RealtimeUser(TierUser):
    """A person in a chat, who reads the streamed answer and asks again after a pause.

    TTFT and the gaps between tokens have their own entries in the statistics.
    """

    weight = 5
    wait_time = between(0.5, 1.5)

    @task  # type: ignore[untyped-decorator]
    def chat(self) -> None:
        nonce = new_nonce()
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = self.chat_body(nonce, service_tier="default", stream=True, stream_options=options)
        outcome = Outcome("realtime", 0, due_s=perf_counter())
        with self.client.post(CHAT_PATH, json=body, stream=True, name="realtime chat", catch_response=True) as response:
            outcome.status = response.status_code
            reader = AnswerReader(outcome, streamed=response.ok)
            for part in response.iter_content(chunk_size=None):
                reader.feed(part, perf_counter())
            reader.finish(perf_counter())
            response.request_meta["response_time"] = 1e3 * (outcome.e2e_s or 0.0)
            if problem := find_problem(outcome, nonce):
                response.failure(problem)
        if outcome.ttft_s is not None:
            self.record("TTFT", "realtime first token", outcome.ttft_s)
        for gap_s in outcome.inter_token_s():
            self.record("ITL", "realtime token gap", gap_s)


class BulkUser(TierUser):
    """A bulk job without pauses: the next request is sent as soon as an answer arrives."""

    weight = 4
    wait_time = constant(0)

    @task  # type: ignore[untyped-decorator]
    def complete(self) -> None:
        nonce = new_nonce()
        body = self.chat_body(nonce, service_tier="flex")
        outcome = Outcome("bulk", 0, due_s=perf_counter())
        with self.client.post(CHAT_PATH, json=body, name="bulk flex", catch_response=True) as response:
            outcome.status = response.status_code
            reader = AnswerReader(outcome, streamed=False)
            reader.feed(response.content or b"", perf_counter())
            reader.finish(perf_counter())
            if problem := find_problem(outcome, nonce):
                response.failure(problem)
        if outcome.error is not None:
            sleep(outcome.retry_after_s or 1.0)


class BatchUser(TierUser):
    """A nightly job: uploads a JSONL file, creates a batch, polls it, and checks every line of the output."""

    weight = 1
    wait_time = between(1, 5)

    @task  # type: ignore[untyped-decorator]
    def batch(self) -> None:
        nonces = {f"line-{i}": new_nonce() for i in range(BATCH_LINES)}
        began_s = perf_counter()
        batch = self._poll(self._submit(nonces))
        problem = None if batch["status"] == "completed" else f"the batch is {batch['status']}"
        problem = problem or self._check(batch.get("output_file_id"), nonces)
        self.record("BATCH", f"batch of {BATCH_LINES} lines", perf_counter() - began_s, problem=problem)

    def _submit(self, nonces: dict[str, str]) -> dict[str, Any]:
        """Upload the lines and create the batch. Return the batch object."""
        lines = "\n".join(json.dumps(line) for line in self._lines(nonces))
        upload = {"file": ("nonces.jsonl", lines.encode(), "application/jsonl")}
        file = self.client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()
        order = {"input_file_id": file.get("id", ""), "endpoint": CHAT_PATH, "completion_window": "24h"}
        created: dict[str, Any] = self.client.post("/v1/batches", json=order).json()
        return created

    def _lines(self, nonces: dict[str, str]) -> Iterator[dict[str, Any]]:
        for custom_id, nonce in nonces.items():
            yield {"custom_id": custom_id, "method": "POST", "url": CHAT_PATH, "body": self.chat_body(nonce)}

    def _poll(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Poll the batch until it has ended or until `BATCH_TIMEOUT_S` have passed. Return its last state."""
        until_s = perf_counter() + BATCH_TIMEOUT_S
        while batch.get("status") not in TERMINAL and perf_counter() < until_s:
            if "id" not in batch:
                return {"status": f"refused: {batch.get('error')}"}
            sleep(BATCH_POLL_S)
            batch = self.client.get(f"/v1/batches/{batch['id']}", name="/v1/batches/{id}").json()
        return batch

    def _check(self, output_file_id: str | None, nonces: dict[str, str]) -> str | None:
        """Return what is wrong with the output file.

        Return None if each line is in the file exactly once and holds its own nonce.
        """
        if output_file_id is None:
            return "the batch is completed without an output file"
        response = self.client.get(f"/v1/files/{output_file_id}/content", name="/v1/files/{id}/content")
        answers = [json.loads(line) for line in response.text.splitlines()]
        if sorted(a["custom_id"] for a in answers) != sorted(nonces):
            return f"{len(answers)} of {len(nonces)} lines in the output"
        texts = {a["custom_id"]: a["response"]["body"]["choices"][0]["message"]["content"] for a in answers}
        wrong = [i for i, nonce in nonces.items() if texts[i].strip() != nonce]
        return f"{len(wrong)} lines are not their nonce" if wrong else None


def find_problem(outcome: Outcome, nonce: str) -> str | None:
    if outcome.error is not None:
        return outcome.error
    return None if outcome.text.strip() == nonce else f"asked for {nonce}, got {outcome.text!r}"
