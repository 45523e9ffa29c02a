"""A whole gateway for tests, wired by `build_gateway`: a real store, memory queues, a scripted worker, a tiny model.

`running_stand` runs one in this event loop without a socket. `serving_stand` runs one behind a real HTTP server, for
tests of connections. `make_stand` builds one that does not run.
"""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import uvicorn
from fastapi import FastAPI
from redis.asyncio import Redis
from starlette.routing import BaseRoute

from engine.interface import ModelKind
from gateway.app import create_app
from gateway.files.local_storage import LocalStorage
from gateway.files.storage import Storage
from gateway.files.store import FileStore
from gateway.http.exposition import WorkerPages
from gateway.http.server.connection import server_config
from gateway.http.server.connections import ConnectionLimits, ConnectionTable
from gateway.http.server.tls import Certificate
from gateway.identity import Keyring
from gateway.jobs.batches.lines.line import Completions
from gateway.jobs.batches.service import BatchService
from gateway.models import Split
from gateway.requests.tokens.model_files import SamplingDefaults
from gateway.requests.tokens.tokenizer import Tokenizer
from gateway.state import Gateway
from scheduler.clock import Clock, SystemClock
from scheduler.config import TierSet, parse_tiers
from scheduler.events.memory import MemoryEventChannel
from scheduler.queue.memory import MemoryQueue
from scheduler.registry.worker_status import TierCapacity, WorkerStatus
from scheduler.store import connection
from tests.gateway.in_process import InProcess
from tests.gateway.scripted_worker import EverAlive, ScriptedWorker, Scripting, answer_with
from tests.gateway.tiny_model import MODEL, tiny_tokenizer
from tests.scheduler.builders import tiers_document
from tests.waiting import until
from tidegate.gateway.models import ModelSource, Queues
from tidegate.gateway.parts import Outside, build_gateway
from tidegate.settings.gateway import GatewaySettings
from tidegate.tracing.exporter import Tracing

_ROUTES: dict[tuple[bool, bool], list[BaseRoute]] = {}  # of the first app with these settings
_STORE: list[str] = []  # the URL of the store for stands that are given none

URL = "http://127.0.0.1:8000"  # of a gateway without a socket

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


@dataclass(slots=True)
class Stand:
    """A gateway and the parts that tests look into."""

    gateway: Gateway
    app: FastAPI
    worker: ScriptedWorker
    url: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()  # closes its HTTP client, too

    @property
    def files(self) -> FileStore:
        return self.gateway.files

    @property
    def batches(self) -> BatchService:
        return self.gateway.batches

    @property
    def waiting(self) -> int:
        return self.gateway.client.num_open

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **kwargs)


def use_store(url: str) -> None:
    """Let stands that are given no store use this one, which they empty."""
    _STORE[:] = [url]


def store_url() -> str:
    return _STORE[0]


def make_tiers(**changes: dict[str, Any]) -> TierSet:
    """Return the stand's tiers, with `changes` to single tiers."""
    return parse_tiers(tiers_document(_TIERS, changes))


@dataclass(frozen=True)
class Bytes:
    """A number of bytes for a setting in MB."""

    number: int

    def __mul__(self, _mb: int) -> int:
        return self.number


@cache
def _settings() -> GatewaySettings:
    return GatewaySettings(served_model_name=[MODEL, "alias"], max_body_mb=1)


def make_stand(
    redis: Redis,
    data_dir: Path,
    script: Scripting | str = "Hello there!",
    *,
    tiers: TierSet | None = None,
    tiers_file: Path | None = None,
    keyring: Keyring | None = None,
    capacity: TierCapacity | None = None,
    clock: Clock | None = None,
    tokenizer: Tokenizer | None = None,
    defaults: SamplingDefaults | None = None,
    kind: ModelKind = "chat",
    storage: Storage | None = None,
    worker_pages: WorkerPages | None = None,
    lines: Completions | None = None,
    tracing: Tracing | None = None,
    more_models: Sequence[ModelSource] = (),
    has_own_queues: bool = False,
    splits: Mapping[str, Split] | None = None,
    **settings: Any,
) -> Stand:
    """Return a gateway that does not run yet. `settings` are those of the gateway, as they are after validation.

    `tiers` are in force, and `tiers_file` is where new ones come from. `lines` answers the lines of batches.
    `more_models` are served beside the stand's own, which
    shares its queues with static endpoints unless it `has_own_queues`.
    """
    clock, tiers = clock or SystemClock(), tiers or make_tiers()
    queue, events, registry = MemoryQueue(clock), MemoryEventChannel(), EverAlive(clock)
    script = answer_with(script) if isinstance(script, str) else script
    queues = Queues(redis, queue, events, registry)
    chosen = _settings().model_copy(update={"data_dir": data_dir, "tiers": tiers_file, **settings})
    source = ModelSource(
        names=chosen.model_names,
        queues=queues,
        tokenizer=tokenizer or tiny_tokenizer(),
        defaults=defaults or SamplingDefaults(),
        revision="",
        tiers=tiers,
        tiers_path=chosen.tiers_path,
        adapters=frozenset(chosen.adapter_paths),
        kind=kind,
        image_tokens=chosen.image_tokens,
    )
    outside = Outside(
        queues=Queues(redis, MemoryQueue(clock), MemoryEventChannel(), EverAlive(clock)) if has_own_queues else queues,
        models=[source, *more_models],
        splits=splits or {},
        storage=storage or LocalStorage(data_dir),
        worker_pages=worker_pages or WorkerPages(),
        draw=lambda: 0.0,
        lines=lines,
    )
    gateway = build_gateway(chosen, redis, clock, "gateway 1", outside, tracing)
    if keyring is not None and not keyring.is_open:
        gateway.keyring.replace(keyring.keys)
    worker = ScriptedWorker(queue.for_worker("w1"), events, registry, script, capacity)
    app = create_app(gateway)
    # FastAPI describes each route anew for each app, which takes longer than most tests.
    app.router.routes = _ROUTES.setdefault((chosen.console, chosen.private_docs), app.router.routes)
    return _with_clients(gateway, app, worker, URL, InProcess(app))


def _with_clients(
    gateway: Gateway, app: FastAPI, worker: ScriptedWorker, url: str, transport: httpx.AsyncBaseTransport | None
) -> Stand:
    # No TLS here: building a TLS context takes 50 ms. Any: newer openai clients are typed against httpx2.
    http: Any = httpx.AsyncClient(transport=transport, base_url=url, timeout=30, verify=False)
    client = openai.AsyncOpenAI(
        http_client=http, base_url=f"{url}/v1", api_key="sk-test", max_retries=0, _strict_response_validation=True
    )
    return Stand(gateway, app, worker, url, http, client)


@asynccontextmanager
async def running_stand(
    *args: Any,
    redis: Redis | None = None,
    data_dir: Path | None = None,
    with_worker: bool = True,
    workers: Sequence[WorkerStatus] = (),
    **options: Any,
) -> AsyncIterator[Stand]:
    """Run the gateway that `make_stand` returns, on an empty store if there is no `redis`.

    `workers` are alive beside the scripted one.
    """
    async with AsyncExitStack() as stack:
        if redis is None:
            redis = await stack.enter_async_context(connection.connect(_STORE[0]))
            await redis.flushall()
        data_dir = data_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        stand = make_stand(redis, data_dir, *args, **options)
        for status in workers:
            await stand.worker.registry.announce(status)
        if with_worker:
            await stand.worker.announce()
            stack.push_async_callback(stand.worker.stop)
            stack.callback(asyncio.create_task(stand.worker.run()).cancel)
        await stack.enter_async_context(stand.app.router.lifespan_context(stand.app))
        yield await stack.enter_async_context(stand)


@asynccontextmanager
async def serving_stand(
    *args: Any, limits: ConnectionLimits | None = None, certificate: Certificate | None = None, **options: Any
) -> AsyncIterator[Stand]:
    """Run a stand behind a real server on a free loopback port, in this event loop."""
    async with (
        running_stand(*args, **options) as stand,
        served(stand, limits, certificate) as url,
        _with_clients(stand.gateway, stand.app, stand.worker, url, None) as reached,
    ):
        yield reached


@asynccontextmanager
async def served(
    stand: Stand, limits: ConnectionLimits | None = None, certificate: Certificate | None = None
) -> AsyncIterator[str]:
    """Put a running stand behind a real server. Yield its URL."""
    # The protocol is named because asyncio sets TCP_NODELAY on no other: every answer would take 40 ms more.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        table = ConnectionTable(limits or ConnectionLimits(), stand.gateway.metrics.count_closed)
        server = uvicorn.Server(
            server_config(stand.app, table, certificate, lifespan="off", timeout_graceful_shutdown=1)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started or serving.done())
            yield f"{'https' if certificate else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await asyncio.sleep(0)  # closed connections are noticed now, not after the server's next look in 100 ms
            await server.shutdown(sockets=[listener])  # `should_exit` would take up to 100 ms
            serving.cancel()
            await asyncio.wait([serving])
