"""The traffic during the faults: streams, chats, batches and background responses whose answers are known.

Knows OpenAI's API and what each request must answer; does not know faults. Each request ends with one `Answer`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import httpx

from bench.chaos.batches import BATCH_POLL_S, MODEL, BatchWork, Gateways, chat_body
from loadtest.traffic.prompts import draw_nonces

LONG_TOKENS = 160  # of a long stream; nonces are too short to be cut
PROMPTS = [f"Tidegate {n}" for n in range(6)]  # of the long streams
BATCH_LINES = 120
RESPONSE_POLL_S = 0.1
PAUSE_S = 0.05  # seconds between two requests of one client
BESIDE_JOB_S = 1.0  # the same beside a large job, which must get most of the engine
LOST = "connection"  # the error of an answer whose connection broke
MODELS = "model"  # the error of an answer that the model also gets wrong in peace


@dataclass(slots=True)
class Answer:
    """How one request ended. `error` is the server's own; `problem` is what must not be."""

    kind: str
    gateway: str
    began_s: float
    ended_s: float = 0.0
    is_right: bool = False
    error: str = ""  # code of an error in OpenAI's format, or `connection`
    problem: str = ""
    question: str = ""
    text: str = ""  # of a wrong answer
    longest_gap_s: float = 0.0  # between two pieces of a stream
    gap_began_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass(slots=True)
class Load:
    """The clients. `run` keeps them busy until `stop` is called, and then lets each finish what it has begun."""

    urls: Mapping[str, str]  # of each gateway
    seed: int
    limit_s: float  # seconds for any request to end
    pause_s: float = PAUSE_S  # of each client
    answers: list[Answer] = field(default_factory=list)
    batches: list[BatchWork] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)  # of the long streams, by prompt
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _gateways: Gateways = field(init=False)

    def __post_init__(self) -> None:
        self._gateways = Gateways(self.urls)

    async def learn(self) -> None:
        """Ask for the texts of the long streams, before any fault."""
        async with httpx.AsyncClient(timeout=60) as http:
            for prompt in PROMPTS:
                answer = await http.post(
                    f"{self._gateways.url()}/v1/completions", json=_long_body(prompt, stream=False)
                )
                answer.raise_for_status()
                self._texts[prompt] = answer.json()["choices"][0]["text"]

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, with_batches: bool = True) -> None:
        async with httpx.AsyncClient(timeout=httpx.Timeout(self.limit_s)) as http, asyncio.TaskGroup() as group:
            for i, gateway in enumerate((*self.urls, *self.urls)):
                nonces = draw_nonces(400, 100 * self.seed + i)
                group.create_task(self._client(gateway, partial(self._stream_nonce, http), nonces))
                group.create_task(self._client(gateway, partial(self._chat, http), nonces[::-1]))
                prompts = random.Random(self.seed + i).sample(PROMPTS, len(PROMPTS))
                group.create_task(self._client(gateway, partial(self._stream_long, http), prompts))
            for i, gateway in enumerate(self.urls):
                nonces = draw_nonces(400, 100 * self.seed + 10 + i)
                group.create_task(self._client(gateway, partial(self._background, http), nonces))
            if with_batches:
                group.create_task(self._batches(http))

    async def until_answered_since(self, since_s: float, limit_s: float) -> None:
        """Return when each gateway has answered a request that was sent after `since_s`, or after `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while {a.gateway for a in self.answers if a.is_right and a.began_s >= since_s} != set(self.urls):
                    await asyncio.sleep(PAUSE_S)

    async def finish(self, limit_s: float) -> None:
        """Wait until the batches have ended, and check them. Forgive what the model gets wrong without any fault."""
        async with httpx.AsyncClient(timeout=30) as http:
            for answer in self.answers:
                if answer.text and answer.text == await self._gateways.says(http, answer.question):
                    answer.problem, answer.error = "", MODELS
            try:
                async with asyncio.timeout(limit_s):
                    for work in self.batches:
                        work.problem = await self._gateways.judge(http, work)
            except TimeoutError:
                pass  # the problem says "not finished"

    # -- clients -------------------------------------------------------------------------------------------------------

    async def _client(
        self, gateway: str, ask: Callable[[Answer, str], Awaitable[None]], questions: Sequence[str]
    ) -> None:
        """Send the questions one after another, again and again."""
        for question in itertools.cycle(questions):
            if self._stopping.is_set():
                return
            answer = Answer("", gateway, monotonic(), question=question)
            try:
                async with asyncio.timeout(self.limit_s):
                    await ask(answer, question)
            except httpx.HTTPError as error:
                answer.error = LOST
                if isinstance(error, httpx.TimeoutException):
                    answer.problem = f"nothing came for {self.limit_s:.0f} s"
            except TimeoutError:
                answer.problem = f"no end within {self.limit_s:.0f} s"
            except (ValueError, KeyError, TypeError, IndexError) as error:
                answer.problem = f"an answer that is not OpenAI's: {error!r}"
            answer.ended_s = monotonic()
            self.answers.append(answer)
            await asyncio.sleep(self.pause_s if answer.is_right else 4 * self.pause_s)

    async def _stream_nonce(self, http: httpx.AsyncClient, answer: Answer, nonce: str) -> None:
        answer.kind = "stream"
        await self._stream(http, answer, "/v1/chat/completions", chat_body(nonce, stream=True), nonce)

    async def _stream_long(self, http: httpx.AsyncClient, answer: Answer, prompt: str) -> None:
        answer.kind = "long stream"
        await self._stream(http, answer, "/v1/completions", _long_body(prompt, stream=True), self._texts[prompt])

    async def _chat(self, http: httpx.AsyncClient, answer: Answer, nonce: str) -> None:
        answer.kind = "chat"
        reply = await http.post(f"{self.urls[answer.gateway]}/v1/chat/completions", json=chat_body(nonce))
        if not _is_error(reply, answer):
            _compare(answer, reply.json()["choices"][0]["message"]["content"], nonce)

    async def _stream(
        self, http: httpx.AsyncClient, answer: Answer, path: str, body: dict[str, Any], expected: str
    ) -> None:
        text, is_done, last_s = "", False, 0.0
        async with http.stream("POST", self.urls[answer.gateway] + path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                _is_error(reply, answer)
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = monotonic()
                if last_s and now - last_s > answer.longest_gap_s:
                    answer.longest_gap_s, answer.gap_began_s = now - last_s, last_s
                last_s = now
                if line == "data: [DONE]":
                    is_done = True
                    break
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.error = _code(event)
                    if not expected.startswith(text):
                        answer.problem = f"wrong before its error: {text!r}"
                    return
                text += "".join(_piece(choice) for choice in event["choices"])
        if is_done:
            _compare(answer, text, expected)
        else:
            answer.problem = f"ended without an error and without [DONE] after {text!r}"

    async def _background(self, http: httpx.AsyncClient, answer: Answer, nonce: str) -> None:
        """Create a response in the background, and poll it through any gateway."""
        answer.kind = "background"
        body = {"model": MODEL, "input": f"Repeat: {nonce}", "background": True, "temperature": 0}
        reply = await http.post(f"{self.urls[answer.gateway]}/v1/responses", json=body)
        if _is_error(reply, answer):
            return
        response = reply.json()
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(RESPONSE_POLL_S)
            try:
                polled = await http.get(f"{self._gateways.url()}/v1/responses/{response['id']}")
            except httpx.HTTPError:
                continue
            if polled.status_code == 200:
                response = polled.json()
            elif polled.status_code != 503:
                answer.problem = f"a poll was answered with {polled.status_code}: {polled.text[:200]}"
                return
        if response["status"] == "completed":
            _compare(answer, response["output"][0]["content"][0]["text"], nonce)
        else:
            answer.error = _code(response)

    # -- batches -------------------------------------------------------------------------------------------------------

    async def _batches(self, http: httpx.AsyncClient) -> None:
        """Keep a batch under way."""
        for number in itertools.count():
            work = BatchWork(draw_nonces(BATCH_LINES, 1000 + 100 * self.seed + number))
            self.batches.append(work)
            await self._submit(http, work)
            while not self._stopping.is_set():
                batch = await self._gateways.try_json(http, "GET", f"/v1/batches/{work.batch_id}")
                if batch is not None and batch["status"] not in ("validating", "in_progress", "finalizing"):
                    break
                await asyncio.sleep(BATCH_POLL_S)
            if self._stopping.is_set():
                return

    async def _submit(self, http: httpx.AsyncClient, work: BatchWork) -> None:
        """Upload the lines and create the batch, each until it is acknowledged, with a key against doubles."""
        lines = [
            {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/chat/completions", "body": chat_body(nonce)}
            for i, nonce in enumerate(work.nonces)
        ]
        name = f"chaos-{self.seed}-{len(self.batches)}"
        work.batch_id = await self._gateways.submit_lines(http, name, lines, "/v1/chat/completions")


def _long_body(prompt: str, stream: bool) -> dict[str, Any]:
    options = {"max_tokens": LONG_TOKENS, "temperature": 1, "seed": 7, "ignore_eos": True}
    return {"model": MODEL, "prompt": prompt, "stream": stream, **options}


def _piece(choice: dict[str, Any]) -> str:
    piece = choice["text"] if "text" in choice else choice["delta"].get("content")
    return piece or ""


def _is_error(reply: httpx.Response, answer: Answer) -> bool:
    if reply.status_code == 200:
        return False
    answer.error = _code(reply.json())
    if reply.status_code not in (503, 504, 429):
        answer.problem = f"status {reply.status_code}: {reply.text[:200]}"
    return True


def _code(body: dict[str, Any]) -> str:
    """Return the code of an error in OpenAI's format. Raises `KeyError` or `TypeError` for another format."""
    error = body["error"]
    if not isinstance(error["message"], str):
        raise TypeError(error)
    return str(error["code"])


def _compare(answer: Answer, text: str, expected: str) -> None:
    answer.is_right = text == expected
    if not answer.is_right:
        answer.text = text
        same = len(os.path.commonprefix((text, expected)))
        shown = slice(max(0, same - 40), same + 60)
        answer.problem = f"wrong after {same} characters: {text[shown]!r} instead of {expected[shown]!r}"
