"""The gateway process: runs the app under uvicorn until a signal drains it.

Exit codes: 0 after a drain; 78 if it cannot start (an invalid tiers or keys file, a port in use); 1 after another
error.
"""

import asyncio
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import TYPE_CHECKING

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import disable_created_metrics
from redis.asyncio import Redis
from redis.exceptions import RedisError

from demo_model.location import demo_model_path
from gateway.app import create_app
from gateway.batches.model import Batch
from gateway.batches.service import BatchService
from gateway.completion.answer_cache import AnswerCache
from gateway.completion.metering import Metering
from gateway.completion.model_revision import model_revision
from gateway.completion.sampling_defaults import SamplingDefaults, read_sampling_defaults
from gateway.completion.service import CompletionService
from gateway.completion.tokenizer import Tokenizer
from gateway.dead_letters import DeadLetters
from gateway.files.object_storage import BadStorageUrl, open_storage
from gateway.files.store import FileStore
from gateway.http.connection import protocol_factory
from gateway.http.connections import ConnectionLimits, ConnectionTable, default_max_connections
from gateway.http.cors import AllowedOrigins
from gateway.http.hosts import AllowedHosts, address_of
from gateway.http.metrics import GatewayMetrics
from gateway.http.tls import Certificate, CertificateError, load_certificate, secured
from gateway.idempotency.store import IdempotencyStore
from gateway.identity import Keyring
from gateway.keys.file import KeyringError
from gateway.keys.limits import KeyLimits
from gateway.keys.source import KeySource
from gateway.keys.usage import UsageMeter
from gateway.responses.service import ResponseService
from gateway.responses.store import ResponseStore
from gateway.state import Gateway, GatewayTiers
from gateway.tasks.endings import Endings
from gateway.tasks.service import TaskService
from gateway.uploads.service import UploadService
from gateway.webhooks.sender import WebhookSender
from gateway.webhooks.service import WebhookService
from gateway.webhooks.store import EventStore
from gateway.webhooks.target import TargetPolicy
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock, SystemClock
from scheduler.config import TierConfigError, TierSet, load_tiers
from scheduler.events.redis import RedisEventChannel
from scheduler.queue.redis import RedisQueue
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.reload.coordinator import TierChanges
from scheduler.reload.follower import TierFollower
from scheduler.reload.store import TierStore
from scheduler.store import connection
from scheduler.tasks.queue import TaskQueue
from tidegate.background import Background
from tidegate.drain import Drain
from tidegate.listening import CannotListen, listen
from tidegate.notify import report_life
from tidegate.process import (
    SWITCH_INTERVAL_S,
    freeze_heap,
    gateway_name,
    hangup_calls,
    ignore_hangup,
    raise_descriptor_limit,
    signals_call,
)
from tidegate.settings import GatewaySettings
from tidegate.supervisor import EX_CONFIG
from tidegate.tracing.start import TracingError, traced

if TYPE_CHECKING:
    from tidegate.tracing.exporter import Tracing

log = structlog.get_logger()


class NoTokenizer(Exception):
    """No tokenizer can be loaded for the model. The message is one sentence for the operator."""


class BadSamplingDefaults(Exception):
    """The sampling defaults of the model cannot be used. The message is one sentence for the operator."""


def run_gateway(settings: GatewaySettings) -> int:
    """Run the gateway until SIGTERM or SIGINT. Return the exit code."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they would be a second series beside every counter
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ignore_hangup()
    max_descriptors = raise_descriptor_limit()
    try:
        with (
            listen(settings.host, settings.port) as listener,
            traced("gateway", gateway_name(listener.getsockname()[1]), settings.otel) as tracing,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as run,
        ):
            return run.run(_serve(settings, listener, connection_limits(settings, max_descriptors), tracing))
    except (
        TierConfigError,
        KeyringError,
        NoTokenizer,
        BadSamplingDefaults,
        CannotListen,
        CertificateError,
        BadStorageUrl,
        TracingError,
    ) as error:
        log.error("the gateway cannot start", reason=str(error))
        return EX_CONFIG
    except (RedisError, OSError) as error:
        log.error("the store does not answer", reason=str(error))
    except Exception:
        log.exception("the gateway died")
    return 1


def build_gateway(
    settings: GatewaySettings,
    redis: Redis,
    tiers: TierSet,
    clock: Clock,
    part: str,
    tracing: "Tracing | None" = None,
) -> FastAPI:
    """Return the app with everything that it uses. `part` is the name of this process in the store."""
    gateway_id = secrets.token_hex(8)
    queue = RedisQueue(redis, clock)
    client = SchedulerClient(
        queue=queue,
        events=RedisEventChannel(redis),
        registry=RedisWorkerRegistry(redis),
        tiers=tiers,
        clock=clock,
        gateway_id=gateway_id,
    )
    names = settings.model_names
    metrics = GatewayMetrics()
    tokenizer = load_tokenizer(settings)
    defaults = load_sampling_defaults(settings)
    key_source = KeySource(settings.api_keys, settings.operator_keys, lambda: client.tiers, clock)
    keyring, revision = key_source.keyring, f"{settings.load_format} {model_revision(settings.model_path)}"
    limits = KeyLimits(redis, clock, metrics.count_rate_limited)
    usage = UsageMeter(redis, metrics, clock)
    cache = AnswerCache(
        redis,
        clock,
        f"{names[0]} {revision}",
        max_ttl_s=settings.answer_cache_ttl_s,
        max_bytes=settings.answer_cache_mb * 2**20,
    )
    dead_letters = DeadLetters(redis)
    metering = Metering(keyring, limits, usage, cache, metrics)
    completions = CompletionService(
        client,
        clock,
        tokenizer,
        metrics,
        names,
        defaults=defaults,
        trusts_templates=settings.trust_request_chat_template,
        tool_parser=settings.tool_parser,
        metering=metering,
        dead_letters=dead_letters,
        revision=revision,
        adapters=settings.adapter_paths.keys(),
    )
    storage = open_storage(settings.files_url, settings.data_dir)
    files = FileStore(redis, settings.data_dir, clock, settings.disk_reserve_mb * 2**20, storage)
    max_body_bytes = settings.max_body_mb * 2**20
    webhooks = make_webhooks(settings, redis, keyring, clock, metrics)
    responses = make_responses(settings, redis, completions, clock, webhooks)

    async def announce(batch: Batch) -> None:
        await webhooks.announce(f"batch.{batch.status}", batch.id, batch.metadata, batch.owner)

    batches = BatchService(
        redis,
        files,
        responses,
        tiers,
        names,
        clock,
        max_lines=settings.batch_max_lines,
        max_unfinished=settings.batch_max_unfinished,
        max_body_bytes=max_body_bytes,
        workers=lambda: client.workers,
        keyring=keyring,
        count_tokens=tokenizer.count,
        dead_letters=dead_letters,
        on_end=announce,
        tracer=tracing.batches() if tracing is not None else None,
    )
    subject, tier_store = GatewayTiers(client, keyring, batches), TierStore(redis)
    follower = TierFollower(tier_store, subject, part, tiers, settings.tiers_path, clock)
    gateway = Gateway(
        model_names=names,
        created=clock.wall_ms() // 1000,
        client=client,
        clock=clock,
        tokenizer=tokenizer,
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
        responses=responses,
        dead_letters=dead_letters,
        tasks=TaskService(
            TaskQueue(redis, clock, max_bytes=settings.tasks_quota_mb * 2**20),
            Endings(redis),
            client,
            clock,
            settings.task_ttl_s,
            settings.task_timeout_s,
        ),
        tier_changes=TierChanges(tier_store, follower, queue.depths, settings.tiers_path, clock),
        max_body_bytes=max_body_bytes,
        allowed_origins=AllowedOrigins(settings.allowed_origins or ()),
        allowed_hosts=AllowedHosts(settings.allowed_hosts or (), settings.host),
        files_quota_mb=settings.files_quota_mb,
        tracing=tracing.middleware if tracing is not None else None,
        private_docs=settings.private_docs,
        console=settings.console,
    )
    return create_app(gateway)


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
    store = ResponseStore(redis, clock, settings.response_ttl_s, settings.response_store_mb * 2**20)
    return ResponseService(completions, clock, redis, store, drain_s=settings.drain_s, announcer=webhooks)


def connection_limits(settings: GatewaySettings, max_descriptors: int) -> ConnectionLimits:
    """Return the limits of connections that the settings choose, for a process with so many descriptors."""
    most = default_max_connections(max_descriptors)
    if settings.max_connections is not None and settings.max_connections > most:
        log.warning("max_connections is more than the limit of descriptors allows", allowed=most)
    most = min(most, settings.max_connections or most)
    proxies = [ip_network(entry, strict=False) for entry in settings.trusted_proxies or ()]

    def is_proxy(address: str) -> bool:
        return any(ip in proxy for proxy in proxies) if (ip := address_of(address)) is not None else False

    return ConnectionLimits(
        max_connections=most,
        max_per_address=settings.max_connections_per_address or max(1, most * 3 // 4),
        exempt=is_proxy,
    )


def load_tokenizer(settings: GatewaySettings) -> Tokenizer:
    """Return the model's tokenizer.

    If it cannot be loaded, return the tokenizer of the demo model if the model's weights are dummies, and raise
    `NoTokenizer` otherwise.
    """
    try:
        return Tokenizer.load(settings.model_path)
    except (OSError, ValueError) as error:
        if settings.load_format == "dummy":
            return Tokenizer.load(str(demo_model_path()))
        reason = str(error).splitlines()[0]
        raise NoTokenizer(f"no tokenizer can be loaded from {settings.model_path}: {reason}") from error


def load_sampling_defaults(settings: GatewaySettings) -> SamplingDefaults:
    """Return the sampling defaults that the settings choose.

    Raises `BadSamplingDefaults` if the settings choose the model's defaults and these are invalid.
    """
    if settings.sampling_defaults == "openai":
        return SamplingDefaults()
    try:
        defaults = read_sampling_defaults(settings.model_path)
    except ValueError as error:
        raise BadSamplingDefaults(str(error)) from error
    if defaults.model_fields_set:
        log.info("using the sampling defaults of the model", **defaults.model_dump(exclude_unset=True))
    return defaults


async def _serve(
    settings: GatewaySettings, listener: socket.socket, limits: ConnectionLimits, tracing: "Tracing | None"
) -> int:
    clock = SystemClock()
    tiers, certificate = load_tiers(settings.tiers_path), load_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    redis = connection.connect(str(settings.redis_url))
    port: int = listener.getsockname()[1]
    app = build_gateway(settings, redis, tiers, clock, gateway_name(port), tracing)
    table = ConnectionTable(limits, app.state.gateway.metrics.count_closed)
    protocol = protocol_factory(table)
    config = uvicorn.Config(
        app,
        http=protocol if certificate is None else secured(protocol, certificate, table),  # type: ignore[arg-type]
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_proxies or [],
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    gateway: Gateway = app.state.gateway
    drain = Drain(server, gateway.client, settings.drain_s)
    background = Background()

    def reload() -> None:
        if gateway.tier_changes is not None and gateway.key_source is not None:
            background.start(gateway.tier_changes.reload_on_signal())
            background.start(gateway.key_source.reload())
        if certificate is not None:
            reload_certificate(certificate)

    freeze_heap()
    log.info("the gateway serves", host=settings.host, port=port, tls=certificate is not None)
    try:
        with signals_call(drain), hangup_calls(reload, drain):
            async with background:
                background.start(report_life(lambda: server.started))
                await server.serve(sockets=[listener])
    finally:
        await redis.aclose()
    log.info("the gateway has drained")
    return 0 if server.started else 1


def reload_certificate(certificate: Certificate) -> None:
    try:
        certificate.reload()
    except CertificateError as error:
        log.error("the certificate was not reloaded; the one in use stays", reason=str(error))
    else:
        log.info("the certificate was reloaded")


class _Server(uvicorn.Server):
    """A uvicorn server without signal handling.

    uvicorn's own signal handling would end a drained process by the signal, not with exit code 0.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
