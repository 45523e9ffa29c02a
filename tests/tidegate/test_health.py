"""A worker's own port: what it answers, and when."""

import asyncio
import socket
from http import HTTPStatus
from pathlib import Path
from unittest import mock

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.http.exposition import render_worker
from scheduler.store.errors import StoreRefused
from scheduler.store.keys import WORKER_TTL_S
from scheduler.worker.metrics import SchedulerMetrics
from tests.scheduler.builders import make_tiers
from tests.scheduler.queue.harness import ManualClock
from tests.tidegate.test_worker import Rig, play
from tidegate.settings.worker import WorkerSettings
from tidegate.supervision.keeper import EX_CONFIG, WATCHDOG_S
from tidegate.supervision.process import listen
from tidegate.worker.health import WorkerHealth, answering
from tidegate.worker.process import WorkerProcess, run_process

OK, UNAVAILABLE = HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE


def statuses(health: WorkerHealth) -> list[HTTPStatus]:
    return [health.answer(path)[0] for path in ("/livez", "/readyz?verbose")]


def test_a_worker_lives_while_it_loads_and_is_dead_when_it_hangs() -> None:
    clock = ManualClock()
    health = WorkerHealth(clock, lambda: "it loads", bytes)
    clock.advance(10 * WATCHDOG_S)
    assert statuses(health) == [OK, UNAVAILABLE]
    health.note_alive()
    clock.advance(WATCHDOG_S - 1)
    assert health.answer("/livez") == (OK, "text/plain", b"ok\n")
    clock.advance(1)
    assert statuses(health) == [UNAVAILABLE, UNAVAILABLE]
    health.note_alive()
    assert statuses(health) == [OK, UNAVAILABLE]


def test_a_worker_is_ready_while_the_store_has_its_heartbeats_and_it_does_not_drain() -> None:
    async def story(rig: Rig, serving: "asyncio.Task[None]") -> None:
        assert rig.runner.why_not_ready() == ""
        generation = await rig.submit(rig.request("r", "bulk", max_tokens=470))
        with mock.patch.object(rig.registry, "announce", side_effect=StoreRefused("its memory is full")):
            await rig.clock.sleep(WORKER_TTL_S - 1)
            assert rig.runner.why_not_ready() == ""
            await rig.clock.sleep(1)
            assert "the store does not answer" in rig.runner.why_not_ready()
        await rig.clock.sleep(2)
        assert rig.runner.why_not_ready() == ""
        rig.runner.end()
        assert rig.runner.why_not_ready() == "the worker drains"
        async with generation:
            pass

    play(story)


def test_every_sample_of_a_workers_page_names_the_worker_and_the_main_ones_are_there_under_vllms_names() -> None:
    registry = CollectorRegistry()
    SchedulerMetrics(registry, make_tiers())
    families = list(text_string_to_metric_families(render_worker(registry, "w", "m").decode()))
    ours = [sample for family in families for sample in family.samples if family.name.startswith("tidegate_")]
    assert ours and all(sample.labels["worker"] == "w" for sample in ours)
    assert "vllm:time_to_first_token_seconds" in {family.name for family in families}


def test_the_port_answers_while_the_process_works_and_is_closed_after_it(tmp_path: Path) -> None:
    seen: list[httpx.Response] = []
    pages: list[str] = []

    def serve(process: WorkerProcess) -> None:  # in the thread of the process, as the loading of a model
        pages.append(process.identity.page)
        for method, path in (("GET", "/livez"), ("HEAD", "/readyz"), ("GET", "/metrics"), ("GET", "/"), ("POST", "/")):
            seen.append(httpx.request(method, httpx.URL(process.identity.page).copy_with(path=path), verify=False))

    assert run_process(WorkerSettings(redis_url=f"unix://{tmp_path}/nobody.sock"), serve) == 0
    assert [response.status_code for response in seen] == [200, 503, 200, 404, 501]
    assert seen[0].text == "ok\n" and seen[1].text == ""
    assert seen[2].headers["content-type"].startswith("text/plain; version=")
    with pytest.raises(httpx.ConnectError):
        httpx.get(pages[0], verify=False)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("HTTP/1.1\r\nHost: localhost:8001", 200),
        ("HTTP/1.1\r\nHost: 127.0.0.1", 200),
        ("HTTP/1.0", 200),
        ("HTTP/1.1", 400),
        ("HTTP/1.1\r\nHost: localhost\r\nHost: localhost", 400),
        ("HTTP/1.1\r\nHost: evil@127.0.0.1", 400),
        ("HTTP/1.1\r\nHost: rebound.example", 403),
        (f"HTTP/1.1\r\nHost: {'a' * 400}", 403),
    ],
)
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
def test_a_port_of_this_machine_only_checks_the_host(bound: str, head: str, status: int) -> None:
    with (
        listen(bound, 0) as listener,
        answering(listener, lambda path: (OK, "text/plain", b"ok\n")),
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=30) as client,
    ):
        client.sendall(f"GET /metrics {head}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    is_for_scrapers = bound == "0.0.0.0" and "rebound.example" in head
    assert answer.split()[1] == str(200 if is_for_scrapers else status).encode()


def test_a_port_in_use_is_named_with_its_flag(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        settings = WorkerSettings(redis_url=f"unix://{tmp_path}/nobody.sock", health_port=port)
        assert run_process(settings, lambda process: None) == EX_CONFIG
    said = capfd.readouterr()
    assert f"cannot listen on 127.0.0.1:{port}" in said.out + said.err and "--health-port" in said.out + said.err
