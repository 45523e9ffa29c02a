"""The record of everything that routes need. The composition root, tidegate/gateway/parts.py, builds it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import ASGIApp

from gateway.audit import AuditLog
from gateway.dead_letters import DeadLetters
from gateway.files.store import FileStore
from gateway.http.access.cors import AllowedOrigins
from gateway.http.access.hosts import AllowedHosts
from gateway.http.access.sign_in import SignIn
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
from gateway.models import Models, ServedModel
from gateway.protocol.errors import model_not_found
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.config import TierSet
from scheduler.store.state import StoreState

STORE_TIMEOUT_S = 2.0  # seconds for the store to answer while a route shows the state of the server

TracingMiddleware = Callable[[ASGIApp], ASGIApp]


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of one gateway process, kept in `app.state.gateway`."""

    models: Models
    created: int  # Unix seconds; /v1/models reports it
    client: SchedulerClient  # of static endpoints, and of a model without queues of its own
    clock: Clock
    keyring: Keyring
    metrics: GatewayMetrics
    files: FileStore
    batches: BatchService
    uploads: UploadService
    webhooks: WebhookService
    responses: ResponseService
    tasks: TaskService
    dead_letters: DeadLetters
    audit: AuditLog
    key_source: KeySource
    limits: KeyLimits
    usage: UsageMeter
    idempotency: IdempotencyStore
    read_store: Callable[[], Awaitable[StoreState]]  # what the store says of itself
    store_replicas: int = 0  # how many replicas must have what is acknowledged
    worker_pages: WorkerPages = field(default_factory=WorkerPages)  # whose metrics are shown beside the gateway's own
    allowed_hosts: AllowedHosts = field(default_factory=AllowedHosts)  # while no API keys are configured
    files_quota_mb: int | None = None  # size of all files of a key that has no quota of its own; None: no limit
    sign_in: SignIn | None = None  # None: nobody can sign in to the console
    tracing: TracingMiddleware | None = None  # None: requests are not traced
    console: bool = True  # whether `/` is a page for browsers
    private_docs: bool = False  # whether the API's description and the metrics need an API key
    max_body_bytes: int = 16 * 2**20  # limit of a JSON body; uploads to /v1/files have limits of their own
    allowed_origins: AllowedOrigins = field(default_factory=AllowedOrigins)  # of web pages of other origins

    @property
    def clients(self) -> tuple[SchedulerClient, ...]:
        """All clients of the scheduler: one for each model, and one for static endpoints."""
        own = [served.client for served in self.models]
        return tuple(own if self.client in own else [self.client, *own])

    @property
    def tiers(self) -> TierSet:
        """The tiers in force for the main model."""
        return self.models.main.tiers

    @property
    def is_draining(self) -> bool:
        return self.client.is_draining

    @property
    def num_open(self) -> int:
        """The number of open requests."""
        return sum(client.num_open for client in self.clients)

    def drain(self) -> None:
        """Refuse new requests from now on. Open requests continue."""
        for client in self.clients:
            client.drain()

    def fail_open(self, message: str) -> None:
        """End every open request now with an error that says `message`."""
        for client in self.clients:
            client.fail_open(message)


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves `request`."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def served_of(request: Request, model: str | None = None) -> ServedModel:
    """Return the model that the query parameter `model` of an operator's request names; without it, the main model.

    Raises `ApiError` 404 if there is none of this name.
    """
    models = gateway_of(request).models
    if model is not None and model not in models.names:
        raise model_not_found(model)
    return models.of(model)


OfModel = Annotated[ServedModel, Depends(served_of)]


class GatewayTiers:
    """The part of a change of a model's tiers that concerns one gateway: checks new tiers and puts them in force."""

    def __init__(self, client: SchedulerClient, keyring: Keyring) -> None:
        self._client = client
        self._keyring = keyring

    def objection(self, tiers: TierSet) -> str:
        """Return a sentence that says why `tiers` cannot be put in force; an empty string if they can."""
        return self._keyring.objection(tiers)

    def reconfigure(self, tiers: TierSet) -> None:
        """Use `tiers` for requests from now on. Requests under way keep their tier."""
        self._client.reconfigure(tiers)
