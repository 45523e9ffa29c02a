"""Wires the parts of a gateway: its services on the store, and the app's record of them.

Everything that lies outside of the process comes in as a `Settings`, a connection to the store and the `Outside`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from redis.asyncio import Redis

from gateway.audit import AuditLog
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
from gateway.jobs.batches.forecast.forecasts import BatchModel
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
from gateway.keys.stored import StoredKeys
from gateway.keys.usage import UsageMeter
from gateway.keys.webhooks import TargetPolicy
from gateway.models import Models, Split
from gateway.state import Gateway
from scheduler.clock import Clock
from scheduler.store.durability import wait_for_replicas
from scheduler.store.state import read_state
from scheduler.tasks.queue import TaskQueue
from tidegate.gateway.models import ModelsBuilder, ModelSource, Queues, make_client, open_models
from tidegate.settings.gateway import GatewaySettings

if TYPE_CHECKING:
    from tidegate.tracing.exporter import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a gateway meets beside its store: workers, the models' texts, and files. Tests bring their own."""

    queues: Queues  # of static endpoints, and of a model without queues of its own
    models: Sequence[ModelSource]
    storage: Storage
    splits: Mapping[str, Split] = field(default_factory=dict)
    worker_pages: WorkerPages = field(default_factory=WorkerPages)
    draw: Callable[[], float] = random.random  # distributes the returns of clients that are refused
    lines: Completions | None = None  # who answers the lines of batches; None: this gateway

    async def aclose(self) -> None:
        """Close the connections to the store."""
        for redis in {self.queues.redis, *(source.queues.redis for source in self.models)}:
            await redis.aclose()


def open_outside(settings: GatewaySettings, redis: Redis, clock: Clock) -> Outside:
    """Return the workers on the store, and what the settings name.

    Raises `CannotStart`, `TierConfigError` and `BadStorageUrl`.
    """
    queues, several = Queues.on(redis, clock), settings.several_models()
    return Outside(
        queues=queues,
        models=list(open_models(settings, queues, clock)),
        splits={} if several is None else several.splits,
        storage=open_storage(settings.files_url, settings.data_dir),
        worker_pages=WorkerPages(settings.metrics_of or ()),
    )


def build_gateway(
    settings: GatewaySettings,
    redis: Redis,
    clock: Clock,
    part: str,
    outside: Outside,
    tracing: "Tracing | None" = None,
) -> Gateway:
    """Return a gateway with everything that it uses. `part` is the name of this process in the store."""
    store_bytes = settings.store_mb * 2**20  # its shares are in the setting's description
    wait_for_replicas(redis, settings.store_replicas)
    metrics = GatewayMetrics()
    sources, num_models = outside.models, len(outside.models)
    clients = [make_client(settings, s.queues, s.tiers, clock, outside.draw, num_models) for s in sources]
    client = main = clients[0]
    if sources[0].queues is not outside.queues:
        client = make_client(settings, outside.queues, sources[0].tiers, clock, outside.draw, num_models)
    key_source = KeySource(settings.api_keys, settings.operator_keys, lambda: main.tiers, clock, StoredKeys(redis))
    keyring = key_source.keyring
    audit = AuditLog(redis, clock, part)
    key_source.on_change = audit.add
    limits = KeyLimits(redis, clock, metrics.count_rate_limited)
    usage = UsageMeter(redis, metrics, clock)
    dead_letters = DeadLetters(redis)
    builder = ModelsBuilder(
        settings=settings,
        redis=redis,
        clock=clock,
        part=part,
        keyring=keyring,
        prices=key_source.prices,
        limits=limits,
        usage=usage,
        metrics=metrics,
        dead_letters=dead_letters,
        num_models=num_models,
    )
    served = [builder.served(source, own) for source, own in zip(sources, clients, strict=True)]
    models = Models(served, outside.splits)
    files = FileStore(
        redis,
        settings.data_dir,
        clock,
        settings.disk_reserve_mb * 2**20,
        outside.storage,
        batch_ttl_s=settings.batch_ttl_s,
        ttl_s=settings.file_ttl_s,
    )
    webhooks = make_webhooks(settings, redis, keyring, clock, metrics)
    responses = make_responses(settings, redis, clock, webhooks)
    for one in models:
        add_messages(one.completions)
        responses.add_to(one.completions)

    batches = make_batches(builder, files, models, webhooks, outside.lines, tracing)
    return Gateway(
        models=models,
        created=clock.wall_ms() // 1000,
        client=client,
        clock=clock,
        keyring=keyring,
        metrics=metrics,
        files=files,
        batches=batches,
        uploads=UploadService(redis, files, clock),
        webhooks=webhooks,
        key_source=key_source,
        limits=limits,
        usage=usage,
        idempotency=IdempotencyStore(redis, clock),
        read_store=partial(read_state, redis),
        store_replicas=settings.store_replicas,
        worker_pages=outside.worker_pages,
        responses=responses,
        dead_letters=dead_letters,
        audit=audit,
        tasks=TaskService(
            TaskQueue(redis, clock, max_bytes=store_bytes // 4),
            TaskEnds(redis),
            client,
            clock,
            settings.task_ttl_s,
            settings.task_timeout_s,
        ),
        max_body_bytes=settings.max_body_mb * 2**20,
        allowed_origins=AllowedOrigins(settings.allowed_origins or ()),
        allowed_hosts=AllowedHosts(settings.allowed_hosts or (), settings.host),
        files_quota_mb=settings.files_quota_mb,
        sign_in=settings.sign_in,
        tracing=tracing.middleware if tracing is not None else None,
        private_docs=settings.private_docs,
        console=settings.console,
    )


def make_batches(
    common: ModelsBuilder,
    files: FileStore,
    models: Models,
    webhooks: WebhookService,
    lines: Completions | None,
    tracing: "Tracing | None",
) -> BatchService:
    """Return the service of batches. `lines` answers their lines; None: the gateway's models."""
    settings = common.settings

    async def announce(batch: Batch) -> None:
        await webhooks.announce(f"batch.{batch.status}", batch.id, batch.metadata, batch.owner)

    def find_model(name: str | None) -> BatchModel:
        one = models.of(name)
        return BatchModel(one.name, one.tiers[one.tiers.batch_tier], one.client.live.engines)

    def num_slots() -> int:
        held = [w.tiers.get(one.tiers.batch_tier) for one in models for w in one.client.live.engines]
        return sum(tier.batch_size for tier in held if tier is not None)

    async def count_tokens(name: str | None, texts: Sequence[str]) -> int:
        return await models.of(name).model.tokenizer.count(texts)

    return BatchService(
        common.redis,
        files,
        lines or models,
        find_model,
        models.names,
        common.clock,
        max_lines=settings.batch_max_lines,
        max_unfinished=settings.batch_max_unfinished,
        max_body_bytes=settings.max_body_mb * 2**20,
        keyring=common.keyring,
        count_tokens=count_tokens,
        num_slots=num_slots,
        dead_letters=common.dead_letters,
        on_end=announce,
        ttl_s=settings.batch_ttl_s,
        tracer=tracing.batches() if tracing is not None else None,
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


def make_responses(settings: GatewaySettings, redis: Redis, clock: Clock, webhooks: WebhookService) -> ResponseService:
    """Return the service of /v1/responses. It stores responses unless the settings give them no time."""
    if settings.response_ttl_s == 0:
        return ResponseService(clock)
    store = ResponseStore(redis, clock, settings.response_ttl_s, settings.store_mb * 2**20 // 16)
    return ResponseService(clock, redis, store, drain_s=settings.drain_s, announcer=webhooks)
