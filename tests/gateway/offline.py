"""A gateway with files and batches only: the real routes, stores and Valkey, with scripted completions.

`running_gateway` runs one together with the official client. Several can share one store and data directory.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import openai
import structlog
from fastapi import FastAPI
from openai.types import Batch as ApiBatch
from redis.asyncio import Redis

from gateway.fairness import UnderWay
from gateway.files.storage import Storage
from gateway.files.store import FileStore
from gateway.http.download import MAX_DOWNLOADS, MAX_DOWNLOADS_OF_KEY
from gateway.identity import ApiKey, Keyring
from gateway.jobs.batches.model import Batch
from gateway.jobs.batches.service import BatchService
from gateway.jobs.idempotency.store import IdempotencyStore
from gateway.jobs.uploads.service import UploadService
from gateway.jobs.webhooks.sender import WebhookSender
from gateway.jobs.webhooks.service import WebhookService
from gateway.jobs.webhooks.store import EventStore
from gateway.keys.webhook_target import TargetPolicy
from gateway.protocol import errors
from gateway.protocol.json_body import BodyReader
from gateway.requests.prepare.placement import Placement
from gateway.routes.jobs import batches as batch_routes
from gateway.routes.jobs import files as file_routes
from gateway.routes.jobs import uploads as upload_routes
from scheduler.config import load_tiers
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import JobDeadline
from tests.waiting import until

MODEL = "tide-1"
TERMINAL = ("failed", "completed", "expired", "cancelled")
TIERS = load_tiers(Path(__file__).parents[2] / "tiers.yaml")


class ShiftedClock:
    """The system's clock, with a wall clock that a test can move forward."""

    def __init__(self) -> None:
        self.shift_s = 0

    def now(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.shift_s * 1000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ScriptedCompletions:
    """Answers each question with `Re: <question>`.

    With `permits`, each answer needs one. `statuses` holds the HTTP statuses that a question gets before its answer;
    an exception among them is raised.
    """

    def __init__(self) -> None:
        self.permits: asyncio.Semaphore | None = None
        self.statuses: dict[str, list[int | Exception]] = {}
        self.calls: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.request_ids: list[str] = []
        self.tiers: set[str] = set()
        self.owners: set[str | None] = set()
        self.log_contexts: list[dict[str, Any]] = []  # the log context of each call
        self.deadlines: list[JobDeadline | None] = []
        self.parts: list[str] = []  # names of the parts of jobs
        self.running = self.peak = 0

    async def complete(
        self,
        path: str,
        body: dict[str, Any],
        placement: Placement,
    ) -> tuple[int, dict[str, Any]]:
        question, part = body["messages"][-1]["content"], placement.part
        assert part is not None
        self.deadlines.append(part.deadline)
        self.parts.append(part.name)
        self.owners.add(placement.owner)
        self.calls[question] += 1
        self.request_ids.append(placement.request_id)
        self.tiers.add(placement.tier.name)
        self.log_contexts.append(structlog.contextvars.get_contextvars())
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await (asyncio.sleep(0) if self.permits is None else self.permits.acquire())
            status, answer = self._answer(question, placement.service_tier)
            has_receipt = placement.receipt_for is not None and status == 200
            return status, answer | {"tidegate": {"engine_ms": 1.5}} if has_receipt else answer
        finally:
            self.running -= 1

    def _answer(self, question: str, service_tier: str) -> tuple[int, dict[str, Any]]:
        if script := self.statuses.get(question):
            outcome = script.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            error = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
            return outcome, {"error": error}
        self.answered[question] += 1
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        details = {"prompt_tokens_details": {"cached_tokens": 1}}
        message = {"role": "assistant", "content": f"Re: {question}", "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": usage | details, "service_tier": service_tier}


@dataclass(slots=True)
class OfflineGateway:
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    files: FileStore
    batches: BatchService
    uploads: UploadService
    webhooks: WebhookService  # a test that wants deliveries runs `webhooks.follow()`
    webhook_results: list[str]  # of each attempt
    completions: ScriptedCompletions
    clock: ShiftedClock
    app: FastAPI

    def as_key(self, name: str) -> Self:
        """Return the same gateway, called with the key of that name (see `keyring`)."""
        return replace(self, client=self.client.with_options(api_key=secret_of(name)))

    async def upload(self, content: bytes, name: str = "input.jsonl", purpose: Any = "batch") -> str:
        return (await self.client.files.create(file=(name, content), purpose=purpose)).id

    async def submit(self, lines: Iterable[Any]) -> ApiBatch:
        return await self.create(await self.upload(jsonl(lines)))

    async def create(self, file_id: str, window: Any = "24h", **more: Any) -> ApiBatch:
        return await self.client.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window=window, **more
        )

    async def ended(self, batch_id: str, timeout_s: float = 20.0) -> ApiBatch:
        """Wait until the batch is over and cleared up, and return it."""
        async with asyncio.timeout(timeout_s):
            while (batch := await self.client.batches.retrieve(batch_id)).status not in TERMINAL:
                await asyncio.sleep(0.005)
        directory = self.files.data_dir / "batches" / batch_id
        await until(lambda: not directory.exists())
        return batch

    async def read(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of an output or error file, or none without a file."""
        if file_id is None:
            return []
        content = await self.client.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]

    async def answered(self, batch_id: str, lines: int) -> ApiBatch:
        """Wait until `lines` lines count as completed or failed, and return the batch."""
        async with asyncio.timeout(30):
            while True:
                batch = await self.client.batches.retrieve(batch_id)
                counts = batch.request_counts
                assert counts is not None
                if counts.completed + counts.failed >= lines:
                    return batch
                await asyncio.sleep(0.005)


def line(custom_id: str, /, **changes: Any) -> dict[str, Any]:
    """Return a valid input line that asks `custom_id`, with `changes`. A change to None leaves the key out."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}]}
    whole = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **changes}
    return {key: value for key, value in whole.items() if value is not None}


def lines(count: int) -> list[dict[str, Any]]:
    return [line(f"q{number}") for number in range(count)]


def jsonl(entries: Iterable[Any]) -> bytes:
    """Return the entries as lines of JSON. Entries of bytes are left as they are."""
    texts = [e if isinstance(e, bytes) else json.dumps(e).encode() for e in entries]
    return b"".join(text + b"\n" for text in texts)


def keyring(**tiers: frozenset[str] | None) -> Keyring:
    """Return a keyring with one key per name and the tiers that it may use (None: all)."""
    return Keyring([ApiKey(n, hashlib.sha256(secret_of(n).encode()).digest(), t) for n, t in tiers.items()])


def limited_keyring(**limits: dict[str, Any]) -> Keyring:
    """Return a keyring with one key per name and its limits."""
    keys = keyring(**dict.fromkeys(limits)).keys
    return Keyring([replace(key, **limits[key.name]) for key in keys])


def secret_of(name: str) -> str:
    return f"sk-{name.encode().hex()}"


def make_gateway(
    redis: Redis,
    data_dir: Path,
    *,
    keys: Keyring | None = None,
    completions: ScriptedCompletions | None = None,
    clock: ShiftedClock | None = None,
    max_lines: int = 100_000,
    max_unfinished: int = 200,
    max_lines_in_flight: int = 256,
    lock_ttl_s: float = 6.0,
    max_body_bytes: int = 16 * 2**20,
    reserve_bytes: int = 0,
    files_quota_mb: int | None = None,
    storage: Storage | None = None,
    workers: Sequence[WorkerStatus] = (),
    webhook_secret: str | None = None,
) -> OfflineGateway:
    clock, keys = clock or ShiftedClock(), keys or Keyring()
    completions = completions or ScriptedCompletions()
    files = FileStore(redis, data_dir, clock, reserve_bytes, storage)
    policy, results = TargetPolicy(allow_loopback=True), list[str]()
    webhooks = WebhookService(
        EventStore(redis), WebhookSender(policy), policy, keys, webhook_secret, clock, results.append
    )

    async def announce(batch: Batch) -> None:
        await webhooks.announce(f"batch.{batch.status}", batch.id, batch.metadata, batch.owner)

    batches = BatchService(
        redis,
        files,
        completions,
        TIERS,
        (MODEL, "other"),
        clock,
        keyring=keys,
        count_tokens=_count_words,
        max_lines=max_lines,
        max_unfinished=max_unfinished,
        max_lines_in_flight=max_lines_in_flight,
        lock_ttl_s=lock_ttl_s,
        max_body_bytes=max_body_bytes,
        workers=lambda: workers,
        on_end=announce,
    )
    uploads = UploadService(redis, files, clock)
    app = FastAPI()
    errors.install(app)
    app.include_router(file_routes.router)
    app.include_router(upload_routes.router)
    app.include_router(batch_routes.router)
    app.state.body_reader = BodyReader(16 * max_body_bytes)
    app.state.downloads = UnderWay(MAX_DOWNLOADS, MAX_DOWNLOADS_OF_KEY)
    app.state.gateway = SimpleNamespace(
        files=files,
        batches=batches,
        uploads=uploads,
        webhooks=webhooks,
        tiers=TIERS,
        keyring=keys,
        files_quota_mb=files_quota_mb,
        idempotency=IdempotencyStore(redis, clock),
    )
    # Any: newer openai clients are typed against httpx2. No TLS here: building a TLS context takes 50 ms.
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", verify=False)
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key="-",
        http_client=http,
        max_retries=0,
        _strict_response_validation=True,
    )
    return OfflineGateway(client, http, files, batches, uploads, webhooks, results, completions, clock, app)


async def _count_words(texts: Sequence[str]) -> int:
    return sum(len(text.split()) for text in texts)


@contextlib.asynccontextmanager
async def running_gateway(redis: Redis, data_dir: Path, **settings: Any) -> AsyncIterator[OfflineGateway]:
    gateway = make_gateway(redis, data_dir, **settings)
    await gateway.batches.start()
    try:
        yield gateway
    finally:
        await gateway.batches.close()
        await gateway.http.aclose()
