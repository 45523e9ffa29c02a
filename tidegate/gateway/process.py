"""The gateway process: runs the app under uvicorn until a signal drains it.

Exit codes: 0 after a drain; 78 if it cannot start (an invalid tiers or keys file, a port in use, the storage of another
store); 1 after another error.
"""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import TYPE_CHECKING

import structlog
import uvicorn
import uvloop
from prometheus_client import disable_created_metrics
from redis.exceptions import LockError, RedisError

from engine.config import EngineStartError
from gateway.app import create_app
from gateway.files.marker import ForeignStorage, StorageTie
from gateway.files.object_storage import BadStorageUrl
from gateway.http.access.hosts import address_of
from gateway.http.server.connection import server_config
from gateway.http.server.connections import ConnectionLimits, ConnectionTable, default_max_connections
from gateway.http.server.tls import Certificate, CertificateError, load_certificate
from gateway.keys.file import KeyringError
from scheduler.clock import Clock, SystemClock
from scheduler.config import TierConfigError
from scheduler.queue.redis import RedisQueue
from scheduler.store import connection
from scheduler.store.errors import STORE_AWAY
from tidegate.gateway.drain import Drain
from tidegate.gateway.parts import build_gateway, open_outside
from tidegate.settings.gateway import GatewaySettings
from tidegate.settings.models import ModelsError
from tidegate.supervision.keeper import EX_CONFIG
from tidegate.supervision.notify import report_life
from tidegate.supervision.process import (
    SWITCH_INTERVAL_S,
    Background,
    CannotStart,
    bind,
    gateway_name,
    hangup_calls,
    ignore_hangup,
    open_port,
    raise_descriptor_limit,
    settle_heap,
    signals_call,
)
from tidegate.tracing.start import TracingError, traced

if TYPE_CHECKING:
    from tidegate.tracing.exporter import Tracing

log = structlog.get_logger()

REACH_S = 60.0  # seconds for the store to answer, before the gateway serves
REACH_PAUSE_S = 1.0
CHECK_STORAGE_S = 10.0  # seconds for the storage and the store to show their markers, before the gateway serves
ACCEPTS = 16  # connections that are accepted in one iteration of the event loop


def run_gateway(settings: GatewaySettings) -> int:
    """Run the gateway until SIGTERM or SIGINT. Return the exit code."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they would be a second series beside every counter
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ignore_hangup()
    max_descriptors = raise_descriptor_limit()
    try:
        with (
            # A load balancer finds it closed until the gateway can serve.
            bind(settings.host, settings.port) as listener,
            traced("gateway", gateway_name(listener.getsockname()[1]), settings.otel) as tracing,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as run,
        ):
            return run.run(_serve(settings, listener, connection_limits(settings, max_descriptors), tracing))
    except (
        TierConfigError,
        KeyringError,
        CannotStart,
        EngineStartError,
        ModelsError,
        CertificateError,
        BadStorageUrl,
        ForeignStorage,
        TracingError,
    ) as error:
        log.error("the gateway cannot start", reason=str(error))
        return EX_CONFIG
    except (RedisError, OSError) as error:
        log.error("the store does not answer", reason=str(error))
    except Exception:
        log.exception("the gateway died")
    return 1


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


async def _serve(
    settings: GatewaySettings, listener: socket.socket, limits: ConnectionLimits, tracing: "Tracing | None"
) -> int:
    clock = SystemClock()
    certificate = load_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    redis = connection.connect(str(settings.redis_url))
    port: int = listener.getsockname()[1]
    around = open_outside(settings, redis, clock)
    gateway = build_gateway(settings, redis, clock, gateway_name(port), around, tracing)
    table = ConnectionTable(limits, gateway.metrics.count_closed)
    config = server_config(
        create_app(gateway),
        table,
        certificate,
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_proxies or [],
        timeout_keep_alive=75,
    )
    server = _Server(config)
    drain = Drain(server, gateway, settings.drain_s)
    background = Background()

    def reload() -> None:
        background.start(gateway.audit.add("tiers.reload", "SIGHUP"))
        for served in gateway.models:
            background.start(served.tier_changes.reload_on_signal())
        background.start(gateway.key_source.reload())
        if certificate is not None:
            reload_certificate(certificate)

    try:
        await reach(RedisQueue(redis, clock).probe, clock)
        await check_storage(gateway.files.tie)
        open_port(listener)
        settle_heap()
        log.info("the gateway serves", host=settings.host, port=port, tls=certificate is not None)
        with signals_call(drain), hangup_calls(reload, drain):
            async with background:
                background.start(report_life(lambda: server.started))
                await server.serve(sockets=listeners_of(listener))
    finally:
        await around.aclose()
    log.info("the gateway has drained")
    return 0 if server.started else 1


def listeners_of(listener: socket.socket) -> list[socket.socket]:
    """Return `ACCEPTS` descriptors of the listening socket.

    uvloop accepts one connection of each descriptor in an iteration of the event loop. With one descriptor, a new
    client would wait for as many iterations as others have just opened connections.
    """
    return [listener, *(listener.dup() for _ in range(ACCEPTS - 1))]


async def reach(probe: Callable[[], Awaitable[None]], clock: Clock) -> None:
    """Wait until the store takes `probe`, a write. Raises its error if it has not for `REACH_S`."""
    since_s = clock.now()
    while True:
        try:
            await probe()
            return
        except RedisError as error:
            if clock.now() - since_s >= REACH_S:
                raise
            log.warning("the gateway waits for the store", reason=str(error))
        await clock.sleep(REACH_PAUSE_S)


async def check_storage(tie: StorageTie) -> None:
    """Raise `ForeignStorage` if the storage does not belong to the store.

    If that cannot be told within `CHECK_STORAGE_S`, the gateway serves, and its next sweep finds out.
    """
    try:
        async with asyncio.timeout(CHECK_STORAGE_S):
            await tie.check()
    except (*STORE_AWAY, LockError, OSError) as error:  # `TimeoutError` is an `OSError`
        log.warning("the storage is compared with the store later", reason=str(error) or "no answer in time")


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
