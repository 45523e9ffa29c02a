"""The gateway process: runs the app under uvicorn until a signal drains it.

Exit codes: 0 after a drain; 78 if it cannot start (an invalid tiers or keys file, a port in use); 1 after another
error.
"""

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import disable_created_metrics
from redis.asyncio import Redis
from redis.exceptions import RedisError

from demo_model.location import demo_model_path
from gateway.app import create_app
from gateway.batches.service import BatchService
from gateway.completion.sampling_defaults import SamplingDefaults, read_sampling_defaults
from gateway.completion.service import CompletionService
from gateway.completion.tokenizer import Tokenizer
from gateway.files.store import FileStore
from gateway.http.metrics import GatewayMetrics
from gateway.identity import Keyring, KeyringError, load_keyring
from gateway.state import Gateway, GatewayTiers
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
from tidegate.background import Background
from tidegate.drain import Drain
from tidegate.listening import CannotListen, listen
from tidegate.notify import report_life
from tidegate.process import gateway_name, hangup_calls, ignore_hangup, signals_call
from tidegate.settings import GatewaySettings
from tidegate.supervisor import EX_CONFIG

log = structlog.get_logger()


class NoTokenizer(Exception):
    """No tokenizer can be loaded for the model. The message is one sentence for the operator."""


class BadSamplingDefaults(Exception):
    """The sampling defaults of the model cannot be used. The message is one sentence for the operator."""


def run_gateway(settings: GatewaySettings) -> int:
    """Run the gateway until SIGTERM or SIGINT. Return the exit code."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they would be a second series beside every counter
    ignore_hangup()
    try:
        with (
            listen(settings.host, settings.port) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as run,
        ):
            return run.run(_serve(settings, listener))
    except (TierConfigError, KeyringError, NoTokenizer, BadSamplingDefaults, CannotListen) as error:
        log.error("the gateway cannot start", reason=str(error))
        return EX_CONFIG
    except (RedisError, OSError) as error:
        log.error("the store does not answer", reason=str(error))
    except Exception:
        log.exception("the gateway died")
    return 1


def build_gateway(settings: GatewaySettings, redis: Redis, tiers: TierSet, clock: Clock, part: str) -> FastAPI:
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
    completions = CompletionService(client, clock, tokenizer, metrics, names, defaults=defaults)
    files = FileStore(redis, settings.data_dir, clock)
    keyring = load_keyring(settings.api_keys, tiers) if settings.api_keys else Keyring()
    max_body_bytes = settings.max_body_mb * 2**20
    batches = BatchService(redis, files, completions, tiers, names, clock, max_body_bytes=max_body_bytes)
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
        tier_changes=TierChanges(tier_store, follower, queue.depths, settings.tiers_path, clock),
        max_body_bytes=max_body_bytes,
    )
    return create_app(gateway)


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


async def _serve(settings: GatewaySettings, listener: socket.socket) -> int:
    clock = SystemClock()
    tiers = load_tiers(settings.tiers_path)
    redis = connection.connect(str(settings.redis_url))
    port: int = listener.getsockname()[1]
    app = build_gateway(settings, redis, tiers, clock, gateway_name(port))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    drain = Drain(server, app.state.gateway.client, settings.drain_s)
    changes, background = app.state.gateway.tier_changes, Background()
    log.info("the gateway serves", host=settings.host, port=port)
    try:
        with signals_call(drain), hangup_calls(lambda: background.start(changes.reload_on_signal()), drain):
            async with background:
                background.start(report_life(lambda: server.started))
                await server.serve(sockets=[listener])
    finally:
        await redis.aclose()
    log.info("the gateway has drained")
    return 0 if server.started else 1


class _Server(uvicorn.Server):
    """A uvicorn server without signal handling.

    uvicorn's own signal handling would end a drained process by the signal, not with exit code 0.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
