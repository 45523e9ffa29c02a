"""What is asked of a server in containers: that it is healthy and ready, and that chats, batches and streams end well.

Uses the official client, as users do. Each check returns what is wrong; empty: nothing.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import httpx
from openai import OpenAI, OpenAIError, Stream
from openai.types import Completion

REQUEST_LIMIT_S = 120.0
BATCH_LIMIT_S = 120.0
NUM_LINES = 20  # of a batch
NUM_TOKENS = 1000  # of an answer that still streams when a signal arrives; the demo model's context is 2048
ENDED = ("completed", "failed", "expired", "cancelled")


class Server:
    """A gateway at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_LIMIT_S)

    def is_healthy(self) -> bool:
        return self._answers("/health")

    def is_ready(self) -> bool:
        """Return whether the gateway and at least one worker can serve."""
        return self._answers("/ready")

    @cached_property
    def model(self) -> str:
        return self._client.models.list().data[0].id

    def chat(self) -> str:
        try:
            answer = self._client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=20
            )
        except OpenAIError as error:
            return str(error)
        return "" if answer.choices[0].message.content else "the answer is empty"

    def batch(self) -> str:
        """Run a batch of `NUM_LINES` lines and compare its output with its input."""
        try:
            bodies = [{"model": self.model, "prompt": f"Line {i}", "max_tokens": 8} for i in range(NUM_LINES)]
            lines = [
                {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": b}
                for i, b in enumerate(bodies)
            ]
            content = "\n".join(map(json.dumps, lines)).encode()
            file = self._client.files.create(file=("lines.jsonl", content), purpose="batch")
            batch = self._client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            deadline = time.monotonic() + BATCH_LIMIT_S
            while batch.status not in ENDED:
                if time.monotonic() > deadline:
                    return f"{batch.status} after {BATCH_LIMIT_S:.0f} s"
                time.sleep(0.1)
                batch = self._client.batches.retrieve(batch.id)
            if batch.status != "completed" or batch.output_file_id is None:
                return f"{batch.status}: {batch.errors}"
            output = self._client.files.content(batch.output_file_id).text
        except OpenAIError as error:
            return str(error)
        answered = {found["custom_id"] for found in map(json.loads, output.splitlines()) if found["response"]}
        return "" if len(answered) == NUM_LINES else f"{len(answered)} of {NUM_LINES} lines have an answer"

    def stream(self, after_first_token: Callable[[], None]) -> str:
        """Stream an answer of `NUM_TOKENS` tokens; at its first, call `after_first_token` on a thread of its own.

        The rest must come, and some of it after that call has returned. Passes on what the call raises.
        """
        reason, num_chunks, last_at = None, 0, 0.0
        with ThreadPoolExecutor(max_workers=1) as caller:
            returned_at: Future[float] | None = None
            try:
                for chunk in self._open_stream():
                    reason = chunk.choices[0].finish_reason if chunk.choices else reason
                    num_chunks, last_at = num_chunks + 1, time.monotonic()
                    if returned_at is None:
                        returned_at = caller.submit(_time_after, after_first_token)
            except (OpenAIError, httpx.HTTPError) as error:
                return f"the stream breaks after {num_chunks} chunks: {error}"
            if returned_at is None or reason != "length":
                return f"the stream ends with {reason} after {num_chunks} chunks"
            return "" if last_at > returned_at.result() else "the stream was over before the signal"

    def _open_stream(self) -> Stream[Completion]:
        return self._client.completions.create(
            model=self.model,
            prompt="Once upon a time",
            max_tokens=NUM_TOKENS,
            stream=True,
            extra_body={"min_tokens": NUM_TOKENS},
        )

    def _answers(self, path: str) -> bool:
        try:
            return httpx.get(f"{self._url}{path}", timeout=REQUEST_LIMIT_S).is_success
        except httpx.HTTPError:
            return False


def _time_after(call: Callable[[], None]) -> float:
    call()
    return time.monotonic()
