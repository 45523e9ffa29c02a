"""Wires the models of a gateway: for each its text, its client of the scheduler, and what answers its requests."""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from demo_model.location import demo_model_path
from engine import gguf
from engine.interface import ModelKind
from gateway.dead_letters import DeadLetters
from gateway.fairness import FairLock
from gateway.http.metrics import GatewayMetrics, ModelMetrics
from gateway.identity import Keyring
from gateway.keys.limits import KeyLimits
from gateway.keys.prices import PriceList
from gateway.keys.usage import UsageMeter
from gateway.models import ServedModel
from gateway.output.model_format import ModelFormat
from gateway.requests.generate.answer_cache import AnswerCache
from gateway.requests.generate.metering import Metering
from gateway.requests.generate.service import CompletionService
from gateway.requests.prepare.preparation import Model
from gateway.requests.tokens.model_files import (
    SamplingDefaults,
    kind_of,
    model_revision,
    read_sampling_defaults,
    vocabulary_of,
)
from gateway.requests.tokens.tokenizer import Tokenizer
from gateway.state import GatewayTiers
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.config import TierSet, load_tiers
from scheduler.events.base import EventChannel
from scheduler.events.redis import RedisEventChannel
from scheduler.queue.base import Queue
from scheduler.queue.redis import RedisQueue
from scheduler.registry.base import WorkerRegistry
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.reload.coordinator import TierChanges
from scheduler.reload.follower import TierFollower
from scheduler.reload.store import TierStore
from scheduler.store import address, connection
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.models import ModelEntry, ModelsFile
from tidegate.supervision.process import CannotStart

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Queues:
    """The queues and workers of one model, or those of static endpoints."""

    redis: Redis
    queue: Queue
    events: EventChannel
    registry: WorkerRegistry

    @classmethod
    def on(cls, redis: Redis, clock: Clock) -> "Queues":
        return cls(redis, RedisQueue(redis, clock), RedisEventChannel(redis), RedisWorkerRegistry(redis))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What a gateway is told of one model, and what it reads of the model's files."""

    names: tuple[str, ...]
    queues: Queues
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    revision: str  # tells one version of the model from another
    tiers: TierSet
    tiers_path: Path
    adapters: frozenset[str] = frozenset()
    fallback: str | None = None
    vocabulary: str = ""  # see `vocabulary_of`; empty: unknown
    kind: ModelKind = "chat"
    image_tokens: int = 0


def open_models(settings: GatewaySettings, base: Queues, clock: Clock) -> Iterator[ModelSource]:
    """Return the models that the settings name. One model without a name of its own has the queues `base`.

    Raises `CannotStart`, `TierConfigError` and `EngineStartError`.
    """
    several = settings.several_models()
    if several is None:
        path, names, adapters = settings.model_path, settings.model_names, frozenset(settings.adapter_paths)
        yield _source(settings, settings.entry_of(path), path, names, base, settings.tiers_path, adapters=adapters)
        return
    kinds = dict[str, ModelKind]()
    for name, entry in several.models.items():
        is_file = entry.path.endswith(gguf.SUFFIX)
        path = str(gguf.unpacked(Path(entry.path), with_weights=False)) if is_file else entry.path
        queues = Queues.on(connection.connect(address.of_model(str(settings.redis_url), name)), clock)
        tiers_path = entry.tiers or settings.tiers_path
        source = _source(settings, entry, path, (name, *entry.aliases), queues, tiers_path)
        kinds[name] = source.kind
        yield source
    _check_kinds(several, kinds)


def _check_kinds(models: ModelsFile, kinds: Mapping[str, ModelKind]) -> None:
    """Raise `CannotStart` if a model of one kind would answer for a model of another kind."""
    pairs = [(f"models.{name}.fallback", name, e.fallback) for name, e in models.models.items() if e.fallback]
    pairs += [(f"splits.{name}", next(iter(split)), other) for name, split in models.splits.items() for other in split]
    for place, name, other in pairs:
        if kinds[name] != kinds[other]:
            raise CannotStart(f"{place}: {name!r} is of the kind {kinds[name]}, and {other!r} of {kinds[other]}")


def _source(
    settings: GatewaySettings,
    entry: ModelEntry,
    path: str,
    names: tuple[str, ...],
    queues: Queues,
    tiers_path: Path,
    *,
    adapters: frozenset[str] = frozenset(),
) -> ModelSource:
    return ModelSource(
        names=names,
        queues=queues,
        tokenizer=load_tokenizer(settings, path),
        defaults=load_sampling_defaults(settings, path),
        revision=f"{settings.load_format} {model_revision(path)}",
        tiers=load_tiers(tiers_path),
        tiers_path=tiers_path,
        adapters=adapters,
        fallback=entry.fallback,
        vocabulary=vocabulary_of(path),
        kind=entry.kind or kind_of(path),
        image_tokens=entry.image_tokens,
    )


def make_client(
    settings: GatewaySettings, queues: Queues, tiers: TierSet, clock: Clock, draw: Callable[[], float], num_models: int
) -> SchedulerClient:
    """Return a client of the scheduler. The waiting requests of all models together have a part of the store."""
    return SchedulerClient(
        queue=queues.queue,
        events=queues.events,
        registry=queues.registry,
        tiers=tiers,
        clock=clock,
        gateway_id=secrets.token_hex(8),
        draw=draw,
        queue_bytes=settings.store_mb * 2**20 // 4 // num_models,
        scales_from_zero=settings.scale_from_zero,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsBuilder:
    """What the models of a gateway have in common."""

    settings: GatewaySettings
    redis: Redis
    clock: Clock
    part: str
    keyring: Keyring
    prices: PriceList
    limits: KeyLimits
    usage: UsageMeter
    metrics: GatewayMetrics
    dead_letters: DeadLetters
    num_models: int
    lock: FairLock = field(default_factory=FairLock)

    def served(self, source: ModelSource, client: SchedulerClient) -> ServedModel:
        """Return a model with what answers its requests."""
        model, metrics = make_model(self.settings, source), ModelMetrics(self._registry)
        settings = self.settings
        cache = AnswerCache(
            self.redis,
            self.clock,
            f"{model.names[0]} {source.revision}",
            max_ttl_s=settings.answer_cache_ttl_s,
            max_bytes=self.store_bytes // 64 if settings.answer_cache_ttl_s else 0,
        )
        max_open = self.store_bytes // 4 // self.num_models
        price_of = partial(self.prices.of, model.names[0])
        metering = Metering(self.keyring, self.limits, self.usage, cache, self.metrics, price_of, max_open)
        completions = CompletionService(client, self.clock, model, metrics, metering, self.dead_letters, self.lock)
        tier_store, subject = TierStore(source.queues.redis), GatewayTiers(client, self.keyring)
        follower = TierFollower(tier_store, subject, self.part, source.tiers, source.tiers_path, self.clock)
        changes = TierChanges(tier_store, follower, source.queues.queue.depths, source.tiers_path, self.clock)
        return ServedModel(model, client, completions, changes, metrics, source.fallback)

    @property
    def store_bytes(self) -> int:
        return self.settings.store_mb * 2**20  # its shares are in the setting's description

    @property
    def _registry(self) -> CollectorRegistry | None:
        return self.metrics.registry if self.num_models == 1 else None


def make_model(settings: GatewaySettings, source: ModelSource) -> Model:
    names, tokenizer = source.names, source.tokenizer
    return Model(
        names=names,
        adapters=source.adapters,
        tokenizer=tokenizer,
        format=ModelFormat.of(tokenizer.chat_template, tokenizer.special_tokens, settings.tool_parser),
        defaults=source.defaults,
        fingerprint="fp_" + hashlib.sha256(f"{names[0]}{source.revision}".encode()).hexdigest()[:10],
        trusts_templates=settings.trust_request_chat_template,
        vocabulary=source.vocabulary,
        kind=source.kind,
        image_tokens=source.image_tokens,
    )


def load_tokenizer(settings: GatewaySettings, path: str) -> Tokenizer:
    """Return the tokenizer of the model at `path`.

    If it cannot be loaded, return the tokenizer of the demo model if the model's weights are dummies, and raise
    `CannotStart` otherwise.
    """
    try:
        return Tokenizer.load(path)
    except (OSError, ValueError) as error:
        if settings.load_format == "dummy":
            return Tokenizer.load(str(demo_model_path()))
        reason = " ".join(str(error).split())
        raise CannotStart(f"no tokenizer can be loaded from {path}: {reason}") from error


def load_sampling_defaults(settings: GatewaySettings, path: str) -> SamplingDefaults:
    """Return the sampling defaults that the settings choose for the model at `path`.

    Raises `CannotStart` if the settings choose the model's defaults and these are invalid.
    """
    if settings.sampling_defaults == "openai":
        return SamplingDefaults()
    try:
        defaults = read_sampling_defaults(path)
    except ValueError as error:
        raise CannotStart(str(error)) from error
    if defaults.model_fields_set:
        log.info("using the sampling defaults of the model", model=path, **defaults.model_dump(exclude_unset=True))
    return defaults
