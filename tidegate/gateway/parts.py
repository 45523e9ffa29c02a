"""Wires the parts of a gateway: its services on the store, and the app's record of them.

Everything that lies outside of the process comes in as a `Settings`, a connection to the store and the `Outside`.
"""

import hashlib
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from redis.asyncio import Redis

from demo_model.location import demo_model_path
from gateway.dead_letters import DeadLetters
from gateway.dialects.messages.endpoint import add_messages
from gateway.files.object_storage import open_storage
from gateway.files.storage import Storage
from gateway.files.store import FileStore
from gateway.http.access.cors import AllowedOrigins
from gateway.http.access.hosts import AllowedHosts, address_of
from gateway.http.exposition import WorkerPages
from gateway.http.metrics import GatewayMetrics
from gateway.identity import Keyring
from gateway.jobs.batches.lines.line import Completions
from gateway.jobs.batches.model import Batch
from gateway.jobs.batches.service import BatchService
from gateway.jobs.idempotency.store import IdempotencyStore
from gateway.jobs.responses.service import ResponseService
from gateway.jobs.responses.store import ResponseStore
from gateway.jobs.tasks.service import TaskService
from gateway.jobs.tasks.task_ends import TaskEnds
from gateway.jobs.uploads.service import UploadService
from gateway.jobs.webhooks.sender import WebhookSender
from gateway.jobs.webhooks.service import WebhookService
from gateway.jobs.webhooks.store import EventStore
from gateway.keys.limits import KeyLimits
from gateway.keys.source import KeySource
from gateway.keys.usage import UsageMeter
from gateway.keys.webhooks import TargetPolicy
from gateway.output.model_format import ModelFormat
from gateway.requests.generate.answer_cache import AnswerCache
from gateway.requests.generate.metering import Metering
from gateway.requests.generate.service import CompletionService
from gateway.requests.prepare.preparation import Model
from gateway.requests.tokens.model_files import SamplingDefaults, model_revision, read_sampling_defaults
from gateway.requests.tokens.tokenizer import Tokenizer
from gateway.state import Gateway, GatewayTiers
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.events.base import EventChannel
from scheduler.events.redis import RedisEventChannel
from scheduler.queue.base import Queue
from scheduler.queue.redis import RedisQueue
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.reload.coordinator import TierChanges
from scheduler.reload.follower import TierFollower
from scheduler.reload.store import TierStore
from scheduler.store.durability import wait_for_replicas
from scheduler.tasks.queue import TaskQueue
from tidegate.settings.gateway import GatewaySettings
from tidegate.supervision.process import CannotStart

if TYPE_CHECKING:
    from tidegate.tracing.exporter import Tracing

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a gateway meets beside its store: workers, the model's text and files. Tests bring their own."""

    queue: Queue
    events: EventChannel
    registry: WorkerRegistry
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    revision: str  # tells one version of the model from another
    storage: Storage
    worker_pages: WorkerPages = field(default_factory=WorkerPages)
    draw: Callable[[], float] = random.random  # distributes the returns of clients that are refused
    lines: Completions | None = None  # who answers the lines of batches; None: this gateway


def open_outside(settings: GatewaySettings, redis: Redis, clock: Clock) -> Outside:
    """Return the workers on the store, and what the settings name.

    Raises `CannotStart` and `BadStorageUrl`.
    """
    return Outside(
        queue=RedisQueue(redis, clock),
        events=RedisEventChannel(redis),
        registry=RedisWorkerRegistry(redis),
        tokenizer=load_tokenizer(settings),
        defaults=load_sampling_defaults(settings),
        revision=f"{settings.load_format} {model_revision(settings.model_path)}",
        storage=open_storage(settings.files_url, settings.data_dir),
        worker_pages=WorkerPages(settings.metrics_of or ()),
    )


def build_gateway(
    settings: GatewaySettings,
    redis: Redis,
    tiers: TierSet,
    clock: Clock,
    part: str,
    outside: Outside,
    tracing: "Tracing | None" = None,
) -> Gateway:
    """Return a gateway with everything that it uses. `part` is the name of this process in the store."""
    store_bytes = settings.store_mb * 2**20  # its shares are in the setting's description
    wait_for_replicas(redis, settings.store_replicas)
    client = SchedulerClient(
        queue=outside.queue,
        events=outside.events,
        registry=outside.registry,
        tiers=tiers,
        clock=clock,
        gateway_id=secrets.token_hex(8),
        draw=outside.draw,
        queue_bytes=store_bytes // 4,
        scales_from_zero=settings.scale_from_zero,
    )
    model = make_model(settings, outside)
    metrics = GatewayMetrics()
    key_source = KeySource(settings.api_keys, settings.operator_keys, lambda: client.tiers, clock)
    keyring = key_source.keyring
    limits = KeyLimits(redis, clock, metrics.count_rate_limited)
    usage = UsageMeter(redis, metrics, clock)
    cache = AnswerCache(
        redis,
        clock,
        f"{model.names[0]} {outside.revision}",
        max_ttl_s=settings.answer_cache_ttl_s,
        max_bytes=store_bytes // 64 if settings.answer_cache_ttl_s else 0,
    )
    dead_letters = DeadLetters(redis)
    completions = CompletionService(
        client,
        clock,
        model,
        metrics,
        Metering(keyring, limits, usage, cache, metrics, store_bytes // 4),
        dead_letters,
    )
    files = FileStore(
        redis,
        settings.data_dir,
        clock,
        settings.disk_reserve_mb * 2**20,
        outside.storage,
        batch_ttl_s=settings.batch_ttl_s,
        ttl_s=settings.file_ttl_s,
    )
    max_body_bytes = settings.max_body_mb * 2**20
    webhooks = make_webhooks(settings, redis, keyring, clock, metrics)
    add_messages(completions)
    responses = make_responses(settings, redis, completions, clock, webhooks)

    async def announce(batch: Batch) -> None:
        await webhooks.announce(f"batch.{batch.status}", batch.id, batch.metadata, batch.owner)

    batches = BatchService(
        redis,
        files,
        outside.lines or completions,
        tiers,
        model.names,
        clock,
        max_lines=settings.batch_max_lines,
        max_unfinished=settings.batch_max_unfinished,
        max_body_bytes=max_body_bytes,
        workers=lambda: client.live.engines,
        keyring=keyring,
        count_tokens=model.tokenizer.count,
        dead_letters=dead_letters,
        on_end=announce,
        ttl_s=settings.batch_ttl_s,
        tracer=tracing.batches() if tracing is not None else None,
    )
    subject, tier_store = GatewayTiers(client, keyring, batches), TierStore(redis)
    follower = TierFollower(tier_store, subject, part, tiers, settings.tiers_path, clock)
    return Gateway(
        model=model,
        created=clock.wall_ms() // 1000,
        client=client,
        clock=clock,
        keyring=keyring,
        completions=completions,
        metrics=metrics,
        files=files,
        batches=batches,
        uploads=UploadService(redis, files, clock),
        webhooks=webhooks,
        key_source=key_source,
        limits=limits,
        usage=usage,
        idempotency=IdempotencyStore(redis, clock),
        worker_pages=outside.worker_pages,
        responses=responses,
        dead_letters=dead_letters,
        tasks=TaskService(
            TaskQueue(redis, clock, max_bytes=store_bytes // 4),
            TaskEnds(redis),
            client,
            clock,
            settings.task_ttl_s,
            settings.task_timeout_s,
        ),
        tier_changes=TierChanges(tier_store, follower, outside.queue.depths, settings.tiers_path, clock),
        max_body_bytes=max_body_bytes,
        allowed_origins=AllowedOrigins(settings.allowed_origins or ()),
        allowed_hosts=AllowedHosts(settings.allowed_hosts or (), settings.host),
        files_quota_mb=settings.files_quota_mb,
        tracing=tracing.middleware if tracing is not None else None,
        private_docs=settings.private_docs,
        console=settings.console,
    )


def make_model(settings: GatewaySettings, outside: Outside) -> Model:
    names, tokenizer = settings.model_names, outside.tokenizer
    return Model(
        names=names,
        adapters=frozenset(settings.adapter_paths),
        tokenizer=tokenizer,
        format=ModelFormat.of(tokenizer.chat_template, tokenizer.special_tokens, settings.tool_parser),
        defaults=outside.defaults,
        fingerprint="fp_" + hashlib.sha256(f"{names[0]}{outside.revision}".encode()).hexdigest()[:10],
        trusts_templates=settings.trust_request_chat_template,
    )


def make_webhooks(
    settings: GatewaySettings, redis: Redis, keyring: Keyring, clock: Clock, metrics: GatewayMetrics
) -> WebhookService:
    """Return the service of webhooks. It may call this machine if nobody else reaches the server, and without keys."""
    listens_on = address_of("127.0.0.1" if settings.host == "localhost" else settings.host)
    is_local = keyring.is_open and listens_on is not None and listens_on.is_loopback
    policy = TargetPolicy(allow_loopback=is_local, allow_private=settings.webhook_allow_private)
    secret = settings.webhook_secret.get_secret_value() if settings.webhook_secret is not None else None
    return WebhookService(
        EventStore(redis), WebhookSender(policy), policy, keyring, secret, clock, metrics.count_webhook
    )


def make_responses(
    settings: GatewaySettings, redis: Redis, completions: CompletionService, clock: Clock, webhooks: WebhookService
) -> ResponseService:
    """Return the service of /v1/responses. It stores responses unless the settings give them no time."""
    if settings.response_ttl_s == 0:
        return ResponseService(completions, clock)
    store = ResponseStore(redis, clock, settings.response_ttl_s, settings.store_mb * 2**20 // 16)
    return ResponseService(completions, clock, redis, store, drain_s=settings.drain_s, announcer=webhooks)


def load_tokenizer(settings: GatewaySettings) -> Tokenizer:
    """Return the model's tokenizer.

    If it cannot be loaded, return the tokenizer of the demo model if the model's weights are dummies, and raise
    `CannotStart` otherwise.
    """
    try:
        return Tokenizer.load(settings.model_path)
    except (OSError, ValueError) as error:
        if settings.load_format == "dummy":
            return Tokenizer.load(str(demo_model_path()))
        reason = str(error).splitlines()[0]
        raise CannotStart(f"no tokenizer can be loaded from {settings.model_path}: {reason}") from error


def load_sampling_defaults(settings: GatewaySettings) -> SamplingDefaults:
    """Return the sampling defaults that the settings choose.

    Raises `CannotStart` if the settings choose the model's defaults and these are invalid.
    """
    if settings.sampling_defaults == "openai":
        return SamplingDefaults()
    try:
        defaults = read_sampling_defaults(settings.model_path)
    except ValueError as error:
        raise CannotStart(str(error)) from error
    if defaults.model_fields_set:
        log.info("using the sampling defaults of the model", **defaults.model_dump(exclude_unset=True))
    return defaults
