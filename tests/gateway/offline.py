"""A gateway with scripted answers to the lines of batches, and what tests of files and batches say to it."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

import structlog
from openai.types import Batch as ApiBatch
from redis.asyncio import Redis

from gateway.identity import Keyring
from gateway.jobs.batches import service
from gateway.jobs.uploads.service import UploadService
from gateway.jobs.webhooks.service import WebhookService
from gateway.requests.prepare.placement import Placement
from gateway.requests.tokens.tokenizer import Tokenizer
from scheduler.clock import SystemClock
from scheduler.config import load_tiers
from scheduler.registry.worker_status import WorkerStatus
from scheduler.request import JobDeadline
from tests.gateway.api_keys import key, secret_of
from tests.gateway.stand import Stand, make_stand
from tests.gateway.tiny_model import pretrained
from tests.waiting import until

MODEL = "tide-1"
TERMINAL = ("failed", "completed", "expired", "cancelled")
TIERS = load_tiers(Path(__file__).parents[2] / "tiers.yaml")


class ShiftedClock(SystemClock):
    """The system's clock, with a wall clock that a test can move forward."""

    shift_s = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.shift_s * 1000


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
class OfflineGateway(Stand):
    """A stand, of which only the batches run, and the words of its tests."""

    completions: ScriptedCompletions
    clock: ShiftedClock

    @property
    def uploads(self) -> UploadService:
        return self.gateway.uploads

    @property
    def webhooks(self) -> WebhookService:
        """A test that wants deliveries runs its `follow()`."""
        return self.gateway.webhooks

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

    async def ended(self, batch_id: str, timeout_s: float = 30.0) -> ApiBatch:
        """Wait until the batch is over and cleared up, and return it."""
        batch = await self._when(batch_id, lambda batch: batch.status in TERMINAL, timeout_s)
        directory = self.files.data_dir / "batches" / batch_id
        await until(lambda: not directory.exists())
        return batch

    async def answered(self, batch_id: str, lines: int) -> ApiBatch:
        """Wait until `lines` lines count as completed or failed, and return the batch."""

        def are_answered(batch: ApiBatch) -> bool:
            counts = batch.request_counts
            return counts is not None and counts.completed + counts.failed >= lines

        return await self._when(batch_id, are_answered)

    async def _when(self, batch_id: str, holds: Callable[[ApiBatch], bool], timeout_s: float = 30.0) -> ApiBatch:
        async with asyncio.timeout(timeout_s):
            while not holds(batch := await self.client.batches.retrieve(batch_id)):
                await asyncio.sleep(0.005)
        return batch

    async def read(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of an output or error file, or none without a file."""
        if file_id is None:
            return []
        content = await self.client.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]


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
    return Keyring([key(n, t) for n, t in tiers.items()])


def limited_keyring(**limits: dict[str, Any]) -> Keyring:
    """Return a keyring with one key per name and its limits."""
    keys = keyring(**dict.fromkeys(limits)).keys
    return Keyring([replace(key, **limits[key.name]) for key in keys])


class WordTokenizer(Tokenizer):
    """Counts words instead of tokens."""

    async def count(self, texts: Sequence[str]) -> int:
        return sum(len(text.split()) for text in texts)


def make_gateway(
    redis: Redis,
    data_dir: Path,
    *,
    keys: Keyring | None = None,
    completions: ScriptedCompletions | None = None,
    clock: ShiftedClock | None = None,
    **settings: Any,
) -> OfflineGateway:
    """Return a gateway with the shipped tiers. `completions` answers the lines of its batches."""
    clock, completions = clock or ShiftedClock(), completions or ScriptedCompletions()
    stand = make_stand(
        redis,
        data_dir,
        tiers=TIERS,
        keyring=keys,
        clock=clock,
        lines=completions,
        tokenizer=WordTokenizer(pretrained(), max_model_len=4096),
        webhook_allow_private=keys is not None,
        **{"served_model_name": [MODEL, "other"], **settings},
    )
    return OfflineGateway(*(getattr(stand, f.name) for f in fields(Stand)), completions, clock)


@contextlib.asynccontextmanager
async def running_gateway(
    redis: Redis,
    data_dir: Path,
    *,
    workers: Sequence[WorkerStatus] = (),
    lock_ttl_s: float = service.LOCK_TTL_S,
    max_lines_in_flight: int = service.MIN_WINDOW,
    **settings: Any,
) -> AsyncIterator[OfflineGateway]:
    """Run the batches of a gateway beside these workers, and nothing else of it."""
    with mock.patch.multiple(service, LOCK_TTL_S=lock_ttl_s, MIN_WINDOW=max_lines_in_flight):
        stand = make_gateway(redis, data_dir, **settings)
    for status in workers:
        await stand.worker.registry.announce(status)
    await stand.gateway.client.start()
    await stand.batches.start()
    try:
        yield stand
    finally:
        await stand.batches.close()
        await stand.gateway.client.close()
        await stand.client.close()
