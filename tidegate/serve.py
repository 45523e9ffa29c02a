"""`tidegate serve`: a store, a worker and a gateway on one machine, under one supervisor.

Starts the same commands as a deployment on several machines does, and passes them the URL of the store.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from scheduler.config import TierConfigError, load_tiers
from scheduler.registry.redis import RedisWorkerRegistry
from scheduler.reload.store import TierStore
from scheduler.store import connection
from tidegate.process import gateway_name, raise_descriptor_limit, worker_name
from tidegate.settings import CommonSettings, GatewaySettings, ServeSettings, WorkerSettings
from tidegate.supervisor import EX_CONFIG, Part, Stage, Supervisor
from tidegate.valkey import EmbeddedValkey, ValkeyError

log = structlog.get_logger()

REACH_TIMEOUT_S = 5.0  # seconds for an external store to answer, before anything starts
FORGET_TIMEOUT_S = 2.0  # seconds for removing the data that a killed process has left in the store


class CannotServe(Exception):
    """The server cannot start. The message is one sentence for the operator."""


def run_serve(settings: ServeSettings, on_ready: Callable[[], None] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT. Return the exit code."""
    raise_descriptor_limit()
    with contextlib.ExitStack() as cleanup:
        try:
            load_tiers(settings.tiers_path)
            settings = with_address(settings)
            parts = []
            if settings.redis_url:
                asyncio.run(_reach(settings.redis_url))
            else:
                valkey = cleanup.enter_context(EmbeddedValkey(settings.data_dir))
                settings = settings.model_copy(update={"redis_url": valkey.url})
                parts.append(Part("valkey", Stage.STORE, valkey.argv, ready=valkey.is_ready, pass_fds=valkey.pass_fds))
        except (ValkeyError, TierConfigError, CannotServe) as error:
            log.error("cannot start", reason=str(error))
            return EX_CONFIG
        return asyncio.run(_supervise(parts, settings, on_ready or _say_ready(settings)))


def with_address(settings: ServeSettings) -> ServeSettings:
    """Return the settings with a definite port and worker id.

    Port 0 is replaced by a free port. If no worker id is set, it is made of the host name and the port. This id is the
    same at the next start, so that the worker takes over the requests that it left. It differs from the ids of other
    `serve` processes on the same store.
    """
    port = settings.port or _free_port(settings.host)
    worker_id = settings.worker_id or f"{socket.gethostname()}-{port}"
    return settings.model_copy(update={"port": port, "worker_id": worker_id})


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as probe:
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        raise CannotServe(f"cannot listen on {host}: {error.strerror or error}") from error


async def _reach(redis_url: str) -> None:
    """Raise `CannotServe` if the store does not answer. At the start, the reason may be a wrong URL."""
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S), connection.connect(redis_url) as client:
            await client.ping()
    except (RedisError, OSError, ValueError) as error:
        url = urlsplit(redis_url)
        place = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"  # without user and password
        raise CannotServe(f"the store at {place} does not answer: {error or 'no reply'}") from error


async def _supervise(parts: list[Part], settings: ServeSettings, on_ready: Callable[[], None]) -> int:
    async with connection.connect(str(settings.redis_url)) as client:
        parts = [*parts, _worker(settings, client), _gateway(settings, client)]
        return await Supervisor(parts, drain_s=settings.drain_s, on_ready=on_ready).run()


def _worker(settings: ServeSettings, client: Redis) -> Part:
    announced = Announced(RedisWorkerRegistry(client), str(settings.worker_id))
    argv = _command("worker", settings, WorkerSettings)
    part = worker_name(str(settings.worker_id))

    async def forget() -> None:
        await announced.forget()
        await _forget_follower(client, part)

    ready = announced.is_there
    return Part("worker", Stage.WORKER, argv, settings.secret_env, ready=ready, before_start=forget, reloads=True)


def _gateway(settings: ServeSettings, client: Redis) -> Part:
    argv = _command("gateway", settings, GatewaySettings)
    forget = partial(_forget_follower, client, gateway_name(settings.port))
    ready = _Answering(settings.host, settings.port)
    return Part("gateway", Stage.GATEWAY, argv, settings.secret_env, ready=ready, before_start=forget, reloads=True)


async def _forget_follower(client: Redis, part: str) -> None:
    """Remove a killed part's report from the store.

    Otherwise, processes that start now would take it for the report of a live part that has tiers in force. If the
    store is unreachable, the report expires by itself.
    """
    with contextlib.suppress(RedisError, OSError):  # TimeoutError is an OSError
        async with asyncio.timeout(FORGET_TIMEOUT_S):
            await TierStore(client).leave(part)


def _command(name: str, settings: ServeSettings, kind: type[CommonSettings]) -> tuple[str, ...]:
    return (sys.executable, "-m", "tidegate", name, *settings.flags(kind))


class Announced:
    """A probe that tells whether the worker has announced itself, which it does when its engine is ready.

    The announcement of a killed worker is withdrawn first. Otherwise, gateways and this probe would take it for the
    announcement of the new worker for some seconds.
    """

    def __init__(self, registry: RedisWorkerRegistry, worker_id: str) -> None:
        self._registry = registry
        self._worker_id = worker_id
        self._is_forgotten = False

    async def forget(self) -> None:
        """Withdraw an old announcement. If the store is unreachable, `is_there` withdraws it later."""
        self._is_forgotten = False
        with contextlib.suppress(RedisError, OSError):
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await self._withdraw()

    async def is_there(self) -> bool:
        """Return whether the worker is announced. Errors of the store's client are raised."""
        if not self._is_forgotten:
            await self._withdraw()  # if the worker is alive, it announces itself again within about a second
        return any(w.worker_id == self._worker_id for w in await self._registry.workers())

    async def _withdraw(self) -> None:
        await self._registry.withdraw(self._worker_id)
        self._is_forgotten = True


@dataclass(frozen=True, slots=True)
class _Answering:
    """A probe that tells whether the gateway answers `GET /health`.

    The gateway accepts connections before it is ready to answer.
    """

    host: str
    port: int

    async def __call__(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return False
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        try:
            async with asyncio.timeout(2):
                return b" 200 " in await reader.readline()
        except (OSError, TimeoutError):
            return False
        finally:
            writer.close()


def _say_ready(settings: ServeSettings) -> Callable[[], None]:
    def say() -> None:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        names = ", ".join(settings.model_names)
        print(f"Tidegate serves {names} at http://{host}:{settings.port}/v1", flush=True)

    return say
