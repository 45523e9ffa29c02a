"""The gateway process: what it reads from its settings before it serves."""

import asyncio
import errno
import itertools
import json
import math
import socket
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import uvloop
from pydantic import SecretStr
from redis.exceptions import ConnectionError

from gateway.http.metrics import GatewayMetrics
from gateway.identity import Keyring
from gateway.protocol.errors import ApiError
from scheduler.clock import SystemClock
from scheduler.store.connection import connect
from scheduler.virtual_time import VirtualClock, run_virtual
from tidegate.gateway import process
from tidegate.gateway.models import load_sampling_defaults
from tidegate.gateway.parts import make_webhooks
from tidegate.gateway.process import REACH_S, connection_limits, reach, run_gateway
from tidegate.settings.gateway import GatewaySettings
from tidegate.supervision.process import CannotStart


def recommend(directory: Path, temperature: float) -> str:
    (directory / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    return str(directory)


def test_the_setting_decides_which_sampling_defaults_are_used(tmp_path: Path) -> None:
    model = recommend(tmp_path, 0.5)
    assert load_sampling_defaults(GatewaySettings(), model).temperature == 0.5
    assert load_sampling_defaults(GatewaySettings(sampling_defaults="openai"), model).temperature == 1.0


def test_a_sampling_default_out_of_range_prevents_the_start(tmp_path: Path) -> None:
    model = recommend(tmp_path, -1)
    with pytest.raises(CannotStart, match="generation_config.json: temperature"):
        load_sampling_defaults(GatewaySettings(), model)
    assert load_sampling_defaults(GatewaySettings(sampling_defaults="openai"), model).temperature == 1.0


def test_connections_follow_the_descriptors_and_the_settings() -> None:
    limits = connection_limits(GatewaySettings(), 1024)
    assert (limits.max_connections, limits.max_per_address) == (512, 384)
    assert not limits.exempt("127.0.0.1")
    proxies = ["10.0.0.0/8", "::1"]
    settings = GatewaySettings(max_connections=100, max_connections_per_address=5, trusted_proxies=proxies)
    limits = connection_limits(settings, 1024)
    assert (limits.max_connections, limits.max_per_address) == (100, 5)
    assert [limits.exempt(address) for address in ("10.1.2.3", "::1", "11.0.0.1", "")] == [True, True, False, False]
    assert connection_limits(GatewaySettings(max_connections=5000), 1024).max_connections == 512


class RefusingStore:
    """A store that takes writes from the `answers_at`-th probe on."""

    def __init__(self, answers_at: float) -> None:
        self.probes, self.answers_at = 0, answers_at

    async def probe(self) -> None:
        self.probes += 1
        if self.probes < self.answers_at:
            raise ConnectionError("refused")


def test_a_gateway_waits_a_minute_for_its_store() -> None:
    async def story() -> None:
        clock, store = VirtualClock(), RefusingStore(answers_at=3)
        await reach(store.probe, clock)
        assert store.probes == 3
        began_s = clock.now()
        with pytest.raises(ConnectionError):
            await reach(RefusingStore(answers_at=math.inf).probe, clock)
        assert clock.now() - began_s == REACH_S

    run_virtual(story())


def test_a_gateways_port_refuses_connections_until_its_store_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    bound = process.bind("127.0.0.1", 0)
    monkeypatch.setattr(process, "bind", lambda host, port: bound)

    async def reach_no_store(*_: object) -> None:
        with socket.socket() as client:
            tried.append(client.connect_ex(bound.getsockname()))
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(process, "reach", reach_no_store)
    settings = GatewaySettings(redis_url=f"unix://{tmp_path}/nobody.sock", data_dir=tmp_path)
    assert run_gateway(settings) == 1
    assert tried == [errno.ECONNREFUSED]


def test_an_open_port_takes_connections_and_the_slower_of_two_starting_gateways_says_why_it_ends() -> None:
    with process.bind("127.0.0.1", 0) as first, socket.socket() as client:
        place = first.getsockname()
        with process.bind(*place) as second:
            process.open_port(first)
            client.connect(place)
            with pytest.raises(CannotStart, match=f"cannot listen on 127.0.0.1:{place[1]}: another program does"):
                process.open_port(second)


def test_many_connections_are_accepted_in_one_iteration_of_the_loop() -> None:
    """Else a client's new connection would wait behind each one that another client has just opened."""
    count = 2 * process.ACCEPTS
    accepted_at: list[int] = []
    transports: list[asyncio.BaseTransport] = []

    async def accept(listeners: list[socket.socket]) -> None:
        loop, iteration, done = asyncio.get_running_loop(), itertools.count(), asyncio.Event()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted_at.append(now)
                transports.append(transport)
                if len(accepted_at) == count:
                    done.set()

        servers = [await loop.create_server(Accepted, sock=listener) for listener in listeners]
        async with asyncio.timeout(60):
            while not done.is_set():
                now = next(iteration)
                await asyncio.sleep(0)
        for ended in (*servers, *transports):
            ended.close()

    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as run:
        listener = stack.enter_context(process.bind("127.0.0.1", 0))
        process.open_port(listener)
        for _ in range(count):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        run.run(accept(process.listeners_of(listener)))
    assert max(Counter(accepted_at).values()) == process.ACCEPTS


@pytest.mark.parametrize(
    ("host", "is_open", "allows_private", "is_called"),
    [
        ("127.0.0.1", True, False, True),
        ("localhost", True, False, True),
        ("0.0.0.0", True, False, False),
        ("127.0.0.1", False, False, False),
        ("0.0.0.0", False, True, True),
    ],
)
async def test_webhooks_call_this_machine_only_where_it_is_all_there_is(
    host: str, is_open: bool, allows_private: bool, is_called: bool
) -> None:
    secret = SecretStr("whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=")
    settings = GatewaySettings(host=host, webhook_secret=secret, webhook_allow_private=allows_private)
    keyring = Keyring(None if is_open else [])
    webhooks = make_webhooks(settings, connect("redis://127.0.0.1:1"), keyring, SystemClock(), GatewayMetrics())
    with nullcontext() if is_called else pytest.raises(ApiError, match="--webhook-allow-private"):
        webhooks.check({"webhook": "http://localhost:9/hook"}, None)


def test_a_trusted_proxy_is_an_address_or_a_network() -> None:
    assert GatewaySettings.model_validate({"trusted_proxies": "10.0.0.1, 10.1.0.0/16"}).trusted_proxies == [
        "10.0.0.1",
        "10.1.0.0/16",
    ]
