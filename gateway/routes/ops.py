"""The endpoints /, /health, /ping, /ready, /load, /version, /metrics and /openapi.json, for balancers and Prometheus.

They need no API key, except the last two with `--private-docs`. Load balancers may also send HEAD to /health, /ping and
/ready. The server then sends no body.
"""

import asyncio
import contextvars
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.http.exposition import render
from gateway.keys.usage import NO_KEY
from gateway.models import ServedModel
from gateway.routes.dependencies import authenticated
from gateway.routes.operators.scale import read_scale
from gateway.state import STORE_TIMEOUT_S, Gateway, gateway_of
from scheduler.client.client import SchedulerClient
from scheduler.clock import Clock
from scheduler.queue.base import Backlog
from scheduler.registry.worker_status import WorkerStart

log = structlog.get_logger(__name__)

METRICS_PERIOD_S = 1.0  # seconds for which one rendering of /metrics answers every scrape

T = TypeVar("T")

router = APIRouter(tags=["operations"])


@router.head("/", include_in_schema=False)
@router.get("/")
async def root(request: Request) -> dict[str, Any]:
    names = list(gateway_of(request).models.names)
    return {"name": "tidegate", "models": names, "api": "/v1", "docs": "/docs", "metrics": "/metrics"}


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """Answer 200 while the process runs. Only /ready checks the store and the workers."""
    return {"status": "ok"}


@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
async def ping() -> Response:
    """Answer 200 with an empty body while the process runs, as SageMaker and clients of vLLM expect."""
    return Response()


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Return the number of this gateway's open requests, as vLLM does. `/ready` has what waits in all gateways."""
    return {"server_load": gateway_of(request).num_open}


@router.get("/version")
async def version(request: Request) -> dict[str, str]:
    return {"version": request.app.version}


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Answer 200 while requests can be served, else 503 with a list of the missing parts and the store's `refusal`.

    `starting` says what each worker does that starts, and for how many seconds, such as loading its model.
    The store is ready if it answers and takes writes. The gateway tries a write every second.
    """
    is_ready, report = await _readiness(gateway_of(request))
    return JSONResponse(report, status_code=200 if is_ready else 503)


async def _may_look_inside(request: Request) -> None:
    """Raises `ApiError` 401 if metrics and description need an API key and the caller has none."""
    if gateway_of(request).private_docs:
        await authenticated(request)


@router.get("/metrics", dependencies=[Depends(_may_look_inside)])
async def metrics(request: Request) -> Response:
    """Return the metrics of this gateway in Prometheus' text format; under `serve`, also those of its worker."""
    page: Shared[bytes] = request.app.state.metrics_page
    return Response(await page.read(), media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", dependencies=[Depends(_may_look_inside)], include_in_schema=False)
async def openapi(request: Request) -> Response:
    """Return the description of the API."""
    description: Shared[bytes] = request.app.state.description
    return Response(await description.read(), media_type="application/json")


class Shared(Generic[T]):
    """What `make` returns, made at most once for each `period_s` seconds, however many clients read it.

    It is for what is slow or holds Python's global lock: without this limit, its readers would slow down streams.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]], clock: Clock, period_s: float = math.inf) -> None:
        self._make = make
        self._clock = clock
        self._period_s = period_s
        self._began_s = -math.inf
        self._making: asyncio.Task[T] | None = None

    async def read(self) -> T:
        now = self._clock.now()
        if self._making is None or (self._making.done() and now - self._began_s >= self._period_s):
            self._began_s = now
            # A new context, because log lines must not name the request that happened to be the first.
            self._making = asyncio.create_task(self._make(), context=contextvars.Context())
        return await asyncio.shield(self._making)  # a client that hangs up must not cancel it for others


async def _readiness(gateway: Gateway) -> tuple[bool, dict[str, Any]]:
    """Return whether requests can be served now, and the body of the answer.

    With several models, those that have a worker can be served, so one worker of any model is enough.
    """
    depths, starting = await _depths(gateway)
    workers = [w for client in gateway.clients for w in (*client.live.engines, *client.live.endpoints)]
    refusal = gateway.client.refusal
    present = {
        "store": depths is not None and refusal is None,
        "worker": bool(workers) or gateway.client.wait.scales_from_zero,
    }
    missing = [part for part, is_there in present.items() if not is_there]
    is_ready = not missing and not gateway.is_draining
    report = {
        "ready": is_ready,
        "missing": missing,
        "refusal": refusal,
        "draining": gateway.is_draining,
        "waiting": depths or {},
        "models": {served.name: bool(served.client.live.engines) for served in gateway.models},
        "workers": [{"id": w.worker_id, "device": w.device, "models": list(w.model_names)} for w in workers],
        "starting": [
            {"id": w.worker_id, "phase": w.phase, "seconds": round(w.seconds, 1), "share": w.share} for w in starting
        ],
    }
    return is_ready, report


async def _depths(gateway: Gateway) -> tuple[dict[str, int] | None, list[WorkerStart]]:
    """Return the number of waiting requests per tier, of all models, and the workers that start.

    The first is None if the store does not answer. If no worker is known, look for one first.
    """
    depths: Counter[str] = Counter()
    starting: list[WorkerStart] = []
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            for client in gateway.clients:
                if not (client.live.engines or client.live.endpoints):
                    await client.live.look()
                depths.update(await client.depths())
                starting += await client.registry.starting()
    except Exception:  # each store adapter has its own errors; all of them mean "not ready"
        return None, []
    return dict(depths), starting


async def exposition(gateway: Gateway) -> bytes:
    """Return all metrics as Prometheus text. What only the store knows is left out if it does not answer."""
    metrics, main = gateway.metrics, gateway.models.main
    limited = {key.name for key in gateway.keyring.keys if key.is_limited}
    metrics.show_from_the_start(gateway.tiers, limited or {NO_KEY}, (NO_KEY,) if gateway.keyring.is_open else ())
    metrics.store_replicas_expected.set(gateway.store_replicas)
    metrics.batches_late.set(gateway.batches.forecasts.num_late)
    latency_s: float | None = None  # of the store; None: it did not answer
    with suppress(Exception):  # after any error of the store, the gateway's own metrics are still worth reading
        async with asyncio.timeout(STORE_TIMEOUT_S):
            latency_s = max([await _show_queues(gateway, served) for served in gateway.models])
            for status, count in (await gateway.batches.counts_by_status()).items():
                metrics.batches.labels(status).set(count)
            metrics.dead_letters.set(await gateway.dead_letters.count(gateway.clock.wall_ms()))
            metrics.show_store_state(await gateway.read_store())  # last: the server's user may lack the right to INFO
    is_up = latency_s is not None and gateway.client.refusal is None
    metrics.show_store(is_up, STORE_TIMEOUT_S if latency_s is None else latency_s)
    for served in gateway.models:
        _show_workers(served)
        if latency_s is None:
            served.metrics.show_queue_ages({})
    workers = [w for client in gateway.clients for w in (*client.live.engines, *client.live.endpoints)]
    pages = await gateway.worker_pages.read(workers)
    own = {one.name: one.metrics.registry for one in gateway.models if one.metrics.registry is not metrics.registry}
    # Parsing takes about 10 ms per worker, so it runs outside the event loop, which serves streams.
    return await asyncio.to_thread(render, metrics.registry, pages, main.name, own)


async def _show_queues(gateway: Gateway, served: ServedModel) -> float:
    """Set the gauges of a model's queues, and of the workers that it needs. Return the store's latency in seconds."""
    queues = await read_queues(served.client, gateway.clock)
    served.metrics.show_backlogs(queues.backlogs, served.client.predicted_ttfts_s(queues.backlogs))
    served.metrics.show_queue_ages(queues.ages_s)
    served.metrics.show_lost_workers(await served.client.registry.num_lost())
    # Without the store, it stays as it was, so that an autoscaler changes nothing.
    wanted = (await read_scale(gateway, served)).wanted
    gateway.metrics.workers_wanted.labels(served.name).set(wanted)
    served.metrics.workers_required.set(wanted > 0 or not served.client.wait.scales_from_zero)
    return queues.latency_s


def _show_workers(served: ServedModel) -> None:
    live = served.client.live
    served.metrics.show_from_the_start(served.tiers)
    served.metrics.workers_alive.set(len(live.engines) + len(live.endpoints))
    served.metrics.workers_unreadable.set(live.num_unreadable)


@dataclass(frozen=True, slots=True)
class Queues:
    backlogs: Mapping[str, Backlog]  # by tier
    ages_s: Mapping[str, float]  # how long the request at the head of each tier's queue has waited
    latency_s: float  # of one round trip to the store


async def read_queues(client: SchedulerClient, clock: Clock) -> Queues:
    """Read the queues of all tiers. Raises the errors of the store."""
    began_s = clock.now()
    backlogs = await client.backlogs()
    latency_s = clock.now() - began_s
    return Queues(backlogs, await client.queue_ages_s(), latency_s)
