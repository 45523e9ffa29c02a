"""The record of everything that routes need. The composition root, tidegate/gateway/parts.py, builds it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request
from starlette.types import ASGIApp

from gateway.dead_letters import DeadLetters
from gateway.files.store import FileStore
from gateway.http.access.cors import AllowedOrigins
from gateway.http.access.hosts import AllowedHosts
from gateway.http.exposition import WorkerPages
from gateway.http.metrics import GatewayMetrics
from gateway.identity import Keyring
from gateway.jobs.batches.service import BatchService
from gateway.jobs.idempotency.store import IdempotencyStore
from gateway.jobs.responses.service import ResponseService
from gateway.jobs.tasks.service import TaskService
from gateway.jobs.uploads.service import UploadService
from gateway.jobs.webhooks.service import WebhookService
from gateway.keys.limits import KeyLimits
from gateway.keys.source import KeySource
from gateway.keys.usage import UsageMeter
from gateway.requests.generate.service import CompletionService
from gateway.requests.prepare.preparation import Model
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.reload.coordinator import TierChanges

STORE_TIMEOUT_S = 2.0  # seconds for the store to answer while a route shows the state of the server

TracingMiddleware = Callable[[ASGIApp], ASGIApp]


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of one gateway process, kept in `app.state.gateway`."""

    model: Model
    created: int  # Unix seconds; /v1/models reports it
    client: SchedulerClient
    clock: Clock
    keyring: Keyring
    completions: CompletionService
    metrics: GatewayMetrics
    files: FileStore
    batches: BatchService
    uploads: UploadService
    webhooks: WebhookService
    responses: ResponseService
    tasks: TaskService
    dead_letters: DeadLetters
    tier_changes: TierChanges
    key_source: KeySource
    limits: KeyLimits
    usage: UsageMeter
    idempotency: IdempotencyStore
    worker_pages: WorkerPages = field(default_factory=WorkerPages)  # whose metrics are shown beside the gateway's own
    allowed_hosts: AllowedHosts = field(default_factory=AllowedHosts)  # while no API keys are configured
    files_quota_mb: int | None = None  # size of all files of a key that has no quota of its own; None: no limit
    tracing: TracingMiddleware | None = None  # None: requests are not traced
    console: bool = True  # whether `/` is a page for browsers
    private_docs: bool = False  # whether the API's description and the metrics need an API key
    max_body_bytes: int = 16 * 2**20  # limit of a JSON body; uploads to /v1/files have limits of their own
    allowed_origins: AllowedOrigins = field(default_factory=AllowedOrigins)  # of web pages of other origins

    @property
    def tiers(self) -> TierSet:
        """The tiers in force. They may change at any time, so each request reads them only once."""
        return self.client.tiers


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves `request`."""
    gateway: Gateway = request.app.state.gateway
    return gateway


class GatewayTiers:
    """The part of a tier change that concerns one gateway: checks new tiers and puts them in force."""

    def __init__(self, client: SchedulerClient, keyring: Keyring, batches: BatchService) -> None:
        self._client = client
        self._keyring = keyring
        self._batches = batches

    def objection(self, tiers: TierSet) -> str:
        """Return a sentence that says why `tiers` cannot be put in force; an empty string if they can."""
        return self._keyring.objection(tiers)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use `tiers` for requests from now on. Requests under way keep their tier."""
        self._client.reconfigure(tiers)
        self._batches.reconfigure(tiers)
