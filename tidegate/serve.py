"""`tidegate serve`: a store, a worker and a gateway on one machine, under one supervisor.

Starts the same commands as a deployment on several machines does, and passes them the URL of the store.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from urllib.parse import urlsplit

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.http.server.tls import CertificateError, load_certificate
from scheduler.config import TierConfigError, TierSet, load_tiers
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.reload.store import TierStore
from scheduler.store import connection
from tidegate.settings.base import CommonSettings
from tidegate.settings.commands import ServeSettings
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.models import ModelsError
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.keeper import EX_CONFIG, Part, Stage
from tidegate.supervision.notify import remove_dead_folders
from tidegate.supervision.process import CannotStart, gateway_name, listen, raise_descriptor_limit, worker_name
from tidegate.supervision.supervisor import Supervisor
from tidegate.valkey import EmbeddedValkey, ValkeyError

log = structlog.get_logger()

REACH_TIMEOUT_S = 5.0  # seconds for an external store to answer, before anything starts
FORGET_TIMEOUT_S = 2.0  # seconds for removing the data that a killed process has left in the store


def run_serve(settings: ServeSettings, on_ready: Callable[[], None] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT. Return the exit code."""
    raise_descriptor_limit()
    remove_dead_folders()
    with contextlib.ExitStack() as cleanup:
        try:
            load_tiers(settings.tiers_path)
            num_models = len(settings.workers())
            load_certificate(settings.ssl_certfile, settings.ssl_keyfile)
            parts = []
            if settings.redis_url:
                asyncio.run(_reach(settings.redis_url))
            else:
                valkey = cleanup.enter_context(EmbeddedValkey(settings.data_dir, store_mb=settings.store_mb))
                settings = settings.model_copy(update={"redis_url": valkey.url})
                parts.append(_store_part(valkey))
            settings = with_address(settings, num_models)  # after the lock: a killed server may still be ending
        except (ValkeyError, TierConfigError, CannotStart, CertificateError, ModelsError) as error:
            log.error("cannot start", reason=str(error))
            return EX_CONFIG
        return asyncio.run(_supervise(parts, settings, on_ready))


def with_address(settings: ServeSettings, num_models: int = 1) -> ServeSettings:
    """Return the settings with a definite port and worker id. Raises `CannotStart` if the port cannot be used.

    It is checked here because the gateway finds out only beside a worker that loads its model. Port 0 is replaced by a
    free port. If no worker id is set, it is made of the host name and the port. This id is the
    same at the next start, so that the worker takes over the requests that it left. It differs from the ids of other
    `serve` processes on the same store. The gateway's /metrics shows the metrics of the workers, too.
    """
    with listen(settings.host, settings.port) as probe:
        port: int = probe.getsockname()[1]
    worker_id = settings.worker_id or f"{socket.gethostname()}-{port}"
    settings = settings.model_copy(update={"port": port, "worker_id": worker_id})
    return settings.model_copy(update={"metrics_of": [settings.worker_id_of(i) for i in range(num_models)]})


async def _reach(redis_url: str) -> None:
    """Raise `CannotStart` if the store does not answer. At the start, the reason may be a wrong URL."""
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S), connection.connect(redis_url) as client:
            await client.ping()
    except (RedisError, OSError, ValueError) as error:
        url = urlsplit(redis_url)
        place = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"  # without user and password
        raise CannotStart(f"the store at {place} does not answer: {error or 'no reply'}") from error


async def _supervise(parts: list[Part], settings: ServeSettings, on_ready: Callable[[], None] | None) -> int:
    async with connection.connect(str(settings.redis_url)) as client:
        parts, ready = [*parts, *served_parts(settings, client)], asyncio.Event()
        announcing = asyncio.create_task(_announce(ready, settings, client))
        try:
            return await Supervisor(parts, drain_s=settings.drain_s, on_ready=on_ready or ready.set).run()
        finally:
            announcing.cancel()


def served_parts(settings: ServeSettings, client: Redis) -> list[Part]:
    """Return the workers, one for each model, and the gateway. Raises `ModelsError`."""
    workers = [_part("worker", Stage.WORKER, own, WorkerSettings, client, name) for name, own in settings.workers()]
    return [*workers, _part("gateway", Stage.GATEWAY, settings, GatewaySettings, client)]


def _part(
    command: str,
    stage: Stage,
    settings: ServeSettings,
    kind: type[CommonSettings],
    client: Redis,
    name: str | None = None,
) -> Part:
    argv = (sys.executable, "-m", "tidegate", command, *settings.flags(kind))
    before_start = partial(_forget, client, command, settings)
    return Part(name or command, stage, argv, settings.secret_env, before_start=before_start)


def _store_part(valkey: EmbeddedValkey) -> Part:
    hint = f"{valkey.log_path} says why"
    return Part("valkey", Stage.STORE, valkey.argv, ready=valkey.is_ready, pass_fds=valkey.pass_fds, hint=hint)


async def _forget(client: Redis, name: str, settings: ServeSettings) -> None:
    """Remove what a killed part has left in the store: a worker's announcement, and any part's report on tiers.

    Otherwise, others would take them for those of the part that starts now, for some seconds. If the store is
    unreachable, they expire by themselves.
    """
    worker_id = str(settings.worker_id)
    with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
        async with asyncio.timeout(FORGET_TIMEOUT_S):
            if name == "gateway":
                await TierStore(client).leave(gateway_name(settings.port))
                return
            async with connection.connect(settings.store_url) if settings.named_models else nullcontext(client) as own:
                await RedisWorkerRegistry(own).withdraw(worker_id)
                await TierStore(own).leave(worker_name(worker_id))


def start_text(settings: ServeSettings, tiers: TierSet, devices: Iterable[str]) -> str:
    """Return what an operator reads when everything is ready: where to look, what is served, on what, and to whom."""
    lines = [f"Console: {settings.console_url}"] if settings.console else []
    engine = " on ".join([settings.engine, *sorted(set(devices) - {""})])
    access = "with API keys" if settings.api_keys or settings.api_key else f"without API keys, on {settings.host}"
    return "\n".join(
        [
            *lines,
            f"Tidegate serves {', '.join(settings.served_names())} at {settings.root_url}/v1, {access}",
            f"Engine: {engine}. Tiers and their first-token SLOs: {_slos(tiers)}",
            f"Metrics: {settings.root_url}/metrics; live in a terminal: tidegate top --base-url {settings.root_url}",
            "Ctrl-C ends it; requests under way may finish first.",
        ]
    )


def _slos(tiers: TierSet) -> str:
    limits = ((tier.name, tier.slo.ttft_p99_ms) for tier in tiers.by_priority)
    return ", ".join(name if ms is None else f"{name} {ms:g} ms" for name, ms in limits)


async def _announce(ready: asyncio.Event, settings: ServeSettings, client: Redis) -> None:
    """Print the start text when every part is ready."""
    await ready.wait()
    devices: list[str] = []
    with contextlib.suppress(RedisError, OSError):
        for _, own in settings.workers():
            async with connection.connect(own.store_url) as store:
                devices += [worker.device for worker in await RedisWorkerRegistry(store).workers()]
    print(start_text(settings, load_tiers(settings.tiers_path), devices), flush=True)
