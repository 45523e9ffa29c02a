"""A whole gateway for tests: memory queue, a scripted worker, a tiny tokenizer, a real HTTP server.

The worker uses the queue as a real one does (claims under lease, acks, learns of cancels). Instead of a model, a script
of the test decides what each request answers, and in which pieces.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from msgspec.structs import replace
from redis.asyncio import Redis
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.interface import FinishReason
from gateway.app import create_app
from gateway.dead_letters import DeadLetters
from gateway.files.store import FileStore
from gateway.http.access.cors import AllowedOrigins
from gateway.http.access.hosts import AllowedHosts
from gateway.http.metrics import GatewayMetrics
from gateway.http.server.connection import server_config
from gateway.http.server.connections import ConnectionLimits, ConnectionTable
from gateway.http.server.tls import Certificate
from gateway.identity import Keyring
from gateway.jobs.batches.lines.tracing import BatchTracer
from gateway.jobs.batches.service import BatchService
from gateway.jobs.idempotency.store import IdempotencyStore
from gateway.jobs.responses.service import ResponseService
from gateway.jobs.responses.store import ResponseStore
from gateway.jobs.tasks.service import TaskService
from gateway.jobs.tasks.task_ends import TaskEnds
from gateway.jobs.webhooks.service import WebhookService
from gateway.keys.limits import KeyLimits
from gateway.keys.source import KeySource
from gateway.keys.usage import UsageMeter
from gateway.requests.generate.answer_cache import AnswerCache
from gateway.requests.generate.metering import Metering
from gateway.requests.generate.service import OPENAI_DEFAULTS, CompletionService
from gateway.requests.prepare.sampling_defaults import SamplingDefaults
from gateway.requests.tokens.tokenizer import Tokenizer
from gateway.state import Gateway, GatewayTiers, TracingMiddleware
from scheduler.client.client import SchedulerClient
from scheduler.client.held_logprobs import MAX_LOGPROBS
from scheduler.clock import Clock, SystemClock
from scheduler.config import TierSet, parse_tiers
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.memory import MemoryWorkerRegistry
from scheduler.registry.worker_status import TierCapacity, TierStatus, WorkerStatus
from scheduler.reload.coordinator import TierChanges
from scheduler.reload.follower import TierFollower
from scheduler.reload.store import TierStore
from scheduler.request import Claimed, Delivery, EventKind, Lease, Request, TokenEvent
from scheduler.tasks.queue import TaskQueue
from tests.scheduler.builders import tiers_document
from tests.waiting import until

MODEL = "tide/tiny"
CONTEXT = 256
FINISHED_PER_S = {
    "realtime": 0.1,
    "bulk": 0.05,
}  # finished requests per second that the worker announces, for Retry-After
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('odd role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TIERS: dict[str, dict[str, Any]] = {
    "realtime": {
        "priority": 100,
        "service_tiers": ["default", "auto", "priority", "fast"],
        "slo": {"ttft_p99_ms": 500},
        "queue_limit": 64,
        "timeout_ms": 20_000,
    },
    "bulk": {"priority": 10, "service_tiers": ["flex"], "queue_limit": 64},
    "batch": {"priority": 0, "answers_as": "flex"},
}
TIERS = tiers_document(_TIERS, {})


@cache
def pretrained() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer for any text: about one token per byte, and four for an emoji."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the tide rises and the tide falls, user assistant system"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE)


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(pretrained(), max_model_len=CONTEXT)


def token_ids(text: str) -> tuple[int, ...]:
    return tuple(pretrained().backend_tokenizer.encode(text, add_special_tokens=False).ids)


def text_of(ids: Sequence[int]) -> str:
    text: str = pretrained().backend_tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


Scripting = Callable[[Request], Sequence[TokenEvent]]


def answer_with(text: str, *, reason: FinishReason = FinishReason.STOP, cached: int = 0) -> Scripting:
    """Return a script that answers `text`, one token per event, the last one with the finish."""
    return lambda request: token_by_token(request, token_ids(text), reason, cached)


def token_by_token(
    request: Request, ids: Sequence[int], reason: FinishReason = FinishReason.STOP, cached: int = 0
) -> list[TokenEvent]:
    steps = [
        TokenEvent(request.id, EventKind.TOKENS, i, (token,), cached_tokens=cached) for i, token in enumerate(ids[:-1])
    ]
    last = TokenEvent(request.id, EventKind.FINISHED, len(ids) - 1, tuple(ids[-1:]), reason, cached_tokens=cached)
    return [*steps, last]


@dataclass(slots=True)
class ScriptedWorker:
    """One worker. A test may replace `script` at any time, and clear `gate` to hold all events back."""

    queue: MemoryQueue
    events: MemoryEventChannel
    registry: MemoryWorkerRegistry
    script: Scripting
    capacity: TierCapacity | None = None  # announced for each tier; None: unknown
    metrics: str = ""  # announced as the worker's own metrics
    sla: str = "{}"  # announced as the explanation of its controller
    claims: bool = True
    served: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    _serving: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def beat(self) -> None:
        """Announce the worker every second, so that it never counts as silent."""
        while True:
            await self.announce()
            await asyncio.sleep(1.0)

    async def announce(self, metrics: str | None = None) -> None:
        self.metrics = self.metrics if metrics is None else metrics
        tiers = {
            name: TierStatus(batch_size=64, finished_per_s=rate, capacity=self.capacity)
            for name, rate in FINISHED_PER_S.items()
        }
        at_ms = SystemClock().wall_ms()
        status = WorkerStatus("w1", (MODEL,), CONTEXT, len(pretrained()), 0, device="cpu", tiers=tiers, at_ms=at_ms)
        await self.registry.announce(status, self.metrics, self.sla)

    async def run(self) -> None:
        self.gate.set()
        while True:
            await self.queue.wait_for_work(60)
            for request_id in self.queue.cancelled():
                self.cancelled.append(request_id)
                if (task := self._serving.pop(request_id, None)) is not None:
                    task.cancel()
            limits = {"realtime": 100, "bulk": 100, "batch": 100} if self.claims else {}
            for claimed in await self.queue.claim(limits, lease_s=60):
                self.served.append(claimed.request)
                self._serving[claimed.request.id] = asyncio.create_task(self._serve(claimed))

    async def _serve(self, claimed: Claimed) -> None:
        request = claimed.request
        events = list(self.script(request))
        if request.delivery is Delivery.AT_END and events:
            ids = tuple(token for event in events for token in event.token_ids)
            last = events[-1]
            logprobs = tuple(found for event in events for found in event.logprobs)
            prompt = events[0].prompt_logprobs
            events = [replace(last, index=0, token_ids=ids, logprobs=logprobs, prompt_logprobs=prompt)]
        for event in events:
            await self.gate.wait()
            await self.events.publish(request.reply_to, [event])
            await asyncio.sleep(0)
        if events and events[-1].is_last:
            await self.queue.ack([Lease(request.id, claimed.fence)])

    async def stop(self) -> None:
        tasks = list(self._serving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Stand:
    """A running gateway and the parts that tests look into."""

    gateway: Gateway
    worker: ScriptedWorker
    url: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    @property
    def waiting(self) -> int:
        return self.gateway.client.num_open

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **kwargs)


def make_tiers(**changes: dict[str, Any]) -> TierSet:
    """Return the stand's tiers, with `changes` to single tiers."""
    return parse_tiers(tiers_document(_TIERS, changes))


@asynccontextmanager
async def running_stand(
    script: Scripting | str = "Hello there!",
    *,
    tiers: TierSet | None = None,
    keyring: Keyring | None = None,
    with_worker: bool = True,
    capacity: TierCapacity | None = None,
    ping_s: float = 15.0,
    max_body_bytes: int = 2**20,
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
    trusts_templates: bool = False,
    administered: tuple[Redis, Path] | None = None,
    metered: Redis | None = None,
    cache_bytes: int = 2**20,
    clock: Clock | None = None,
    key_source: KeySource | None = None,
    tokenizer: Tokenizer | None = None,
    responses: ResponseStore | None = None,
    webhooks: WebhookService | None = None,
    redis: Redis | None = None,
    tasks: Redis | None = None,
    task_bytes: int = 2**30,
    dead_letters: DeadLetters | None = None,
    allowed_origins: Sequence[str] = (),
    limits: ConnectionLimits | None = None,
    allowed_hosts: AllowedHosts | None = None,
    private_docs: bool = False,
    certificate: Certificate | None = None,
    adapters: tuple[str, ...] = (),
    tracing: TracingMiddleware | None = None,
    batch_tracer: BatchTracer | None = None,
    console: bool = True,
    data_dir: Path | None = None,
    max_logprobs: int = MAX_LOGPROBS,
) -> AsyncIterator[Stand]:
    """Run a gateway.

    `administered` holds the store and the file through which its tiers can be changed. `metered` is the store of
    limits, usage and the answer cache; without it, there are none of them. `redis` and `responses` are the store of
    responses (None: responses are not stored), and `webhooks` hears of their ends. With `redis` and `data_dir`, there
    are files and batches. `tasks` is the store of tasks; with it, the gateway has seen a worker for them.
    """
    clock, tiers, keyring = clock or SystemClock(), tiers or make_tiers(), keyring or Keyring()
    tokenizer = tokenizer or tiny_tokenizer()
    queue, events, registry = MemoryQueue(clock), MemoryEventChannel(), MemoryWorkerRegistry(clock, ttl_s=600)
    script = answer_with(script) if isinstance(script, str) else script
    worker = ScriptedWorker(queue.for_worker("w1"), events, registry, script, capacity)
    client = SchedulerClient(
        queue, events, registry, tiers, clock, "gateway-1", draw=lambda: 0.0, max_logprobs=max_logprobs
    )
    metrics, names = GatewayMetrics(), (MODEL, "alias", *adapters)
    key_limits = usage = metering = None
    if metered is not None:
        key_limits, usage = KeyLimits(metered, clock, metrics.count_rate_limited), UsageMeter(metered, metrics, clock)
        cache = AnswerCache(metered, clock, MODEL, max_ttl_s=3600, max_bytes=cache_bytes)
        metering = Metering(keyring, key_limits, usage, cache, metrics)
    service = CompletionService(
        client,
        clock,
        tokenizer,
        metrics,
        names,
        defaults=defaults,
        ping_s=ping_s,
        trusts_templates=trusts_templates,
        metering=metering,
        dead_letters=dead_letters,
        adapters=adapters,
    )
    offline = ResponseService(service, clock, redis, responses, announcer=webhooks)
    files = redis and data_dir and FileStore(redis, data_dir, clock)
    gateway = Gateway(
        model_names=names,
        created=1_700_000_000,
        client=client,
        clock=clock,
        tokenizer=tokenizer,
        keyring=keyring,
        completions=service,
        metrics=metrics,
        key_source=key_source,
        limits=key_limits,
        usage=usage,
        tier_changes=administered and _tier_changes(*administered, client, queue, keyring),
        responses=offline,
        webhooks=webhooks,
        files=files,
        batches=files and redis and BatchService(redis, files, service, tiers, names, clock, tracer=batch_tracer),
        dead_letters=dead_letters,
        tasks=tasks
        and TaskService(
            TaskQueue(tasks, clock, max_bytes=task_bytes), TaskEnds(tasks), client, clock, 3600.0, 86_400.0
        ),
        idempotency=IdempotencyStore(redis or tasks, clock) if redis or tasks else None,
        max_body_bytes=max_body_bytes,
        allowed_origins=AllowedOrigins(allowed_origins),
        allowed_hosts=allowed_hosts or AllowedHosts(),
        private_docs=private_docs,
        tracing=tracing,
        console=console,
    )
    async with AsyncExitStack() as stack:
        if tasks is not None:
            await registry.announce(WorkerStatus("w2", (), 0, 0, 0, at_ms=clock.wall_ms(), batch_items=4), "")
        if with_worker:
            await worker.announce()
            stack.push_async_callback(worker.stop)
            for work in (worker.run(), worker.beat()):
                stack.callback(asyncio.create_task(work).cancel)
        url = await stack.enter_async_context(_serving(gateway, limits or ConnectionLimits(), certificate))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30, verify=False))
        # No TLS here: building a TLS context takes 50 ms.
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        api = openai.AsyncOpenAI(
            http_client=plain, base_url=f"{url}/v1", api_key="sk-test", max_retries=0, _strict_response_validation=True
        )
        yield Stand(gateway, worker, url, http, await stack.enter_async_context(api))


def _tier_changes(
    redis: Redis, path: Path, client: SchedulerClient, queue: MemoryQueue, keyring: Keyring
) -> TierChanges:
    clock, tier_store = SystemClock(), TierStore(redis)
    subject = GatewayTiers(client, keyring, None)
    follower = TierFollower(tier_store, subject, "gateway 1", client.tiers, path, clock)
    return TierChanges(tier_store, follower, queue.depths, path, clock)


@asynccontextmanager
async def _serving(gateway: Gateway, limits: ConnectionLimits, certificate: Certificate | None) -> AsyncIterator[str]:
    """Run a real server on a free loopback port, in this event loop. Yields its URL."""
    # The protocol is named because asyncio sets TCP_NODELAY on no other: every answer would take 40 ms more.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        table = ConnectionTable(limits, gateway.metrics.count_closed)
        server = uvicorn.Server(server_config(create_app(gateway), table, certificate, timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started or serving.done())
            yield f"{'https' if certificate else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await server.shutdown(sockets=[listener])  # `should_exit` would take up to 100 ms
            serving.cancel()
            await asyncio.wait([serving])
