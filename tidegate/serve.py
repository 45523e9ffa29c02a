"""Everything on one machine: a store, a worker and a gateway under one supervisor.

The same parts as on many machines, started with the same commands; only the store's URL is filled in here.
"""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from scheduler import store
from scheduler.config import TierConfigError, load_tiers
from scheduler.registry.redis import RedisWorkerRegistry
from tidegate.settings import CommonSettings, GatewaySettings, ServeSettings, WorkerSettings
from tidegate.supervisor import EX_CONFIG, Part, Stage, Supervisor
from tidegate.valkey import EmbeddedValkey, ValkeyError

log = structlog.get_logger()

WORKER_ID = "worker-0"


def run_serve(settings: ServeSettings, on_ready: Callable[[], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    with contextlib.ExitStack() as cleanup:
        try:
            load_tiers(settings.tiers_path)
            parts = []
            if not settings.redis_url:
                valkey = cleanup.enter_context(EmbeddedValkey(settings.data_dir))
                settings = settings.model_copy(update={"redis_url": valkey.url})
                parts.append(Part("valkey", Stage.STORE, valkey.argv, ready=valkey.is_ready, pass_fds=valkey.pass_fds))
        except (ValkeyError, TierConfigError) as error:
            log.error("cannot start", reason=str(error))
            return EX_CONFIG
        parts += [_worker(settings), _gateway(settings)]
        supervisor = Supervisor(parts, drain_s=settings.drain_s, on_ready=on_ready or _say_ready(settings))
        return asyncio.run(supervisor.run())


def _worker(settings: ServeSettings) -> Part:
    named = settings.model_copy(update={"worker_id": WORKER_ID})
    argv = _command("worker", named, WorkerSettings)
    return Part("worker", Stage.WORKER, argv, ready=_worker_alive(str(settings.redis_url)))


def _gateway(settings: ServeSettings) -> Part:
    argv = _command("gateway", settings, GatewaySettings)
    return Part("gateway", Stage.GATEWAY, argv, ready=_Answering(settings.host, settings.port))


def _command(name: str, settings: ServeSettings, kind: type[CommonSettings]) -> tuple[str, ...]:
    return (sys.executable, "-m", "tidegate", name, *settings.flags(kind))


def _worker_alive(redis_url: str) -> Callable[[], Awaitable[bool]]:
    async def alive() -> bool:
        client = store.connect(redis_url)
        try:
            return any(w.worker_id == WORKER_ID for w in await RedisWorkerRegistry(client).workers())
        finally:
            await client.aclose()

    return alive


@dataclass(frozen=True, slots=True)
class _Answering:
    """True when something accepts connections at the address: the gateway listens before it is ready to answer, and
    answers in order."""

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
