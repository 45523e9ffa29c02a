"""The supervisor with small real processes that record what happens to them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from tests.tidegate.journal import Journal
from tests.waiting import until
from tidegate.supervision import keeper as supervision
from tidegate.supervision import notify
from tidegate.supervision import process as processes
from tidegate.supervision.keeper import EX_CONFIG, Part, Stage
from tidegate.supervision.supervisor import Supervisor


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator["asyncio.Task[int]"]:
    """Run the supervisor beside the test. Kill its children at the end, whatever the test does."""
    run = asyncio.create_task(supervisor.run())
    try:
        yield run
    finally:
        while not run.done():
            supervisor.stop()
            await asyncio.wait({run}, timeout=0.1)


async def exit_code(run: "asyncio.Task[int]") -> int:
    async with asyncio.timeout(60):
        return await run


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_parts_start_store_first_and_stop_gateway_first(journal: Journal) -> None:
    ready = asyncio.Event()
    parts = [
        journal.part("gateway", Stage.GATEWAY),
        journal.part("worker-0"),
        journal.part("store", Stage.STORE),
        journal.part("worker-1"),
    ]
    supervisor = Supervisor(parts, on_ready=ready.set)
    async with running(supervisor) as run:
        await asyncio.wait_for(ready.wait(), 30)
        assert journal.events()[0] == "start store"
        assert sorted(journal.events()[1:]) == ["start gateway", "start worker-0", "start worker-1"]
        supervisor.stop()
        assert await exit_code(run) == 0
    stops = journal.events()[4:]
    assert stops[0] == "stop gateway"
    assert sorted(stops[1:3]) == ["stop worker-0", "stop worker-1"]
    assert stops[3] == "stop store"


async def test_every_part_has_its_own_session(journal: Journal) -> None:
    """Ctrl-C reaches every process of the terminal's foreground group, which must not contain the parts."""
    names = ("worker-0", "worker-1")
    async with running(Supervisor([journal.part(name) for name in names])):
        await until(lambda: all(journal.pids(name) for name in names))
        assert len({os.getsid(0), *(os.getsid(journal.pids(name)[0]) for name in names)}) == 3


async def test_nothing_starts_before_the_store_is_ready(journal: Journal) -> None:
    asked = 0

    async def never() -> bool:
        nonlocal asked
        asked += 1
        return False

    store = journal.part("store", Stage.STORE)
    store = Part(store.name, store.stage, store.argv, ready=never)
    supervisor = Supervisor([store, journal.part("worker")])
    async with running(supervisor) as run:
        await until(lambda: asked >= 3 and bool(journal.pids("store")))
        assert journal.pids("worker") == []
        supervisor.stop()
        assert await exit_code(run) == 0
    assert journal.events() == ["start store", "stop store"]


async def test_a_part_that_dies_is_started_again(journal: Journal) -> None:
    supervisor = Supervisor([journal.part("worker"), journal.part("gateway", Stage.GATEWAY)])
    async with running(supervisor) as run:
        for life in (1, 2, 3):
            await until(lambda life=life: journal.count("start worker") == life)  # type: ignore[misc]
            os.kill(journal.pids("worker")[-1], signal.SIGKILL)
        await until(lambda: journal.count("start worker") == 4)
        assert journal.count("start gateway") == 1
        supervisor.stop()
        assert await exit_code(run) == 0


async def test_workers_are_kept_running_while_the_gateway_drains(journal: Journal) -> None:
    supervisor = Supervisor(
        [journal.part("worker"), journal.part("gateway", Stage.GATEWAY, "ignore SIGTERM")], drain_s=10
    )
    async with running(supervisor) as run:
        await until(lambda: len(journal.events()) == 2)
        supervisor.stop()
        await until(lambda: journal.count("stop gateway") == 1)
        os.kill(journal.pids("worker")[0], signal.SIGKILL)
        await until(lambda: journal.count("start worker") == 2)
        os.kill(journal.pids("gateway")[0], signal.SIGKILL)
        assert await exit_code(run) == 1
    assert journal.events()[-1] == "stop worker"


async def test_a_part_that_cannot_start_ends_everything_with_78(journal: Journal) -> None:
    parts = [
        journal.part("store", Stage.STORE),
        journal.part("worker", behaviour=f"exit {EX_CONFIG}"),
        journal.part("gateway", Stage.GATEWAY),
    ]
    async with running(Supervisor(parts)) as run:
        assert await exit_code(run) == EX_CONFIG
    assert journal.count("start worker") == 1
    assert journal.events()[-1] == "stop store"


async def test_a_part_that_never_gets_ready_is_given_up(journal: Journal) -> None:
    async with running(Supervisor([journal.part("worker", behaviour="exit 1")])) as run:
        assert await exit_code(run) == 1
    assert journal.count("start worker") == 5


async def test_backoff_grows_to_its_bound_and_begins_anew(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(processes, "LONGEST_PAUSE_S", 0.04)
    monkeypatch.setattr(supervision.log, "warning", lambda event, **fields: waits.append(fields["backoff_s"]))
    async with running(Supervisor([journal.part("worker", behaviour="exit 1")])) as run:
        await exit_code(run)
    assert waits == [0.01, 0.02, 0.04, 0.04]
    waits.clear()
    monkeypatch.setattr(supervision, "SETTLED_S", 0.0)
    async with running(Supervisor([journal.part("worker", behaviour="exit 1")])) as run:
        await exit_code(run)
    assert waits == [0.01, 0.01, 0.01, 0.01]


async def test_a_part_that_has_served_is_started_again_even_after_78(journal: Journal) -> None:
    ready = asyncio.Event()
    supervisor = Supervisor([journal.part("worker")], on_ready=ready.set)
    async with running(supervisor) as run:
        await asyncio.wait_for(ready.wait(), 30)
        os.kill(journal.pids("worker")[0], signal.SIGUSR1)
        await until(lambda: journal.count("start worker") == 2)
        supervisor.stop()
        assert await exit_code(run) == 0


async def test_before_start_is_called_before_each_start(journal: Journal) -> None:
    starts: list[int] = []

    async def before_start() -> None:
        starts.append(journal.count("start worker"))

    supervisor = Supervisor([replace(journal.part("worker"), before_start=before_start)])
    async with running(supervisor) as run:
        await until(lambda: journal.count("start worker") == 1)
        os.kill(journal.pids("worker")[0], signal.SIGKILL)
        await until(lambda: journal.count("start worker") == 2)
        supervisor.stop()
        assert await exit_code(run) == 0
    assert starts == [0, 1]


async def test_a_program_that_does_not_exist_ends_everything(journal: Journal) -> None:
    parts = [Part("worker", Stage.WORKER, ("/nowhere/program",)), journal.part("gateway", Stage.GATEWAY)]
    async with running(Supervisor(parts)) as run:
        assert await exit_code(run) == 1


async def test_a_part_may_end_by_itself_after_its_drain(journal: Journal) -> None:
    """Killed exactly at the end of its drain, a part could not send errors to its clients."""
    supervisor = Supervisor([journal.part("worker", behaviour="serve on")], drain_s=0.05)
    async with running(supervisor) as run:
        await until(lambda: bool(journal.pids("worker")))
        supervisor.stop()
        assert await exit_code(run) == 0
    assert journal.events() == ["start worker", "stop worker", "stop worker"]


async def test_a_part_that_is_not_running_has_nothing_to_drain(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 600)
    monkeypatch.setattr(processes, "LONGEST_PAUSE_S", 600)
    monkeypatch.setattr(supervision.log, "warning", lambda *_, **__: ended.set())
    supervisor = Supervisor([journal.part("worker", behaviour="exit 1")])
    async with running(supervisor) as run:
        await asyncio.wait_for(ended.wait(), 30)
        supervisor.stop()
        assert await exit_code(run) == 0
    assert journal.count("start worker") == 1


async def test_a_part_that_does_not_drain_is_killed_with_its_children(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "KILL_GRACE_S", 0.1)
    stubborn = journal.part("worker", behaviour="ignore SIGTERM")
    shell = ("/bin/sh", "-c", 'trap "" TERM; "$@" & wait', "sh", *stubborn.argv)
    supervisor = Supervisor([Part("worker", Stage.WORKER, shell, ready=stubborn.ready)], drain_s=0.1)
    async with running(supervisor) as run:
        await until(lambda: bool(journal.pids("worker")))
        supervisor.stop()
        assert await exit_code(run) == 1
    await until(lambda: gone(journal.pids("worker")[0]))


async def test_a_second_stop_kills_at_once(journal: Journal) -> None:
    supervisor = Supervisor([journal.part("worker", behaviour="ignore SIGTERM")], drain_s=600)
    async with running(supervisor) as run:
        await until(lambda: bool(journal.pids("worker")))
        supervisor.stop()
        await until(lambda: journal.count("stop worker") == 1)
        assert not run.done()
        supervisor.stop()
        assert await exit_code(run) == 1


# -- parts that report -----------------------------------------------------------------------------------------------

# Usage: JOURNAL BEHAVIOUR. Writes "start reporter PID" and then reports its life, as the behaviour tells.
REPORTER = """
import asyncio, os, signal, sys
from pathlib import Path
from tidegate.supervision import notify

journal, behaviour = sys.argv[1:]
notify.ALIVE_S = 0.02

async def main():
    with open(journal, "a") as file:
        file.write(f"start reporter {os.getpid()}\\n")
    await notify.report_life(lambda: behaviour != "load", lambda: behaviour == "get stuck")

asyncio.run(main())
"""


def reporter(journal: Journal, behaviour: str = "serve") -> Part:
    argv = (sys.executable, "-c", REPORTER, str(journal.path), behaviour)
    return Part("reporter", Stage.WORKER, argv)


async def test_a_part_that_hangs_is_killed_and_started_again(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = asyncio.Event()
    monkeypatch.setattr(supervision, "WATCHDOG_S", 2.0)
    with capture_logs() as logs:
        async with running(Supervisor([reporter(journal)], on_ready=ready.set)) as run:
            await asyncio.wait_for(ready.wait(), 30)
            os.kill(journal.pids("reporter")[0], signal.SIGSTOP)
            await until(lambda: journal.count("start reporter") == 2)
            assert gone(journal.pids("reporter")[0])
            assert not run.done()
    assert {"part": "reporter", "silent_s": 2.0}.items() <= next(
        line for line in logs if line["event"].startswith("killing a part that hangs")
    ).items()


async def test_a_part_that_is_stuck_is_killed_and_one_that_is_not_ready_may_take_its_time(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither gives a sign of life, but the second one may be loading a model."""
    monkeypatch.setattr(supervision, "WATCHDOG_S", 0.1)
    loads = Journal(journal.path.with_name("loads"))
    parts = [replace(reporter(loads, "load"), name="loads"), reporter(journal, "get stuck")]
    async with running(Supervisor(parts)):
        await until(lambda: loads.count("start reporter") == 1)
        lives = journal.count("start reporter")
        await until(lambda: journal.count("start reporter") == lives + 2)
        assert loads.count("start reporter") == 1
        assert not gone(loads.pids("reporter")[0])


def test_a_process_without_a_supervisor_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("", "/nowhere/notify", "@nobody"):
        monkeypatch.setenv(notify.VARIABLE, address)
        notify._send(notify.READY)


# -- reloading -----------------------------------------------------------------------------------------------------


async def test_sighup_is_passed_on_to_the_parts_and_ends_none(journal: Journal) -> None:
    deaf = journal.part("deaf")  # has no handler for SIGHUP
    async with running(Supervisor([deaf, journal.part("gateway", behaviour="reload")])) as run:
        await until(lambda: len(journal.events()) == 2)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: journal.count("reload gateway") == 1)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: journal.count("reload gateway") == 2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await exit_code(run) == 0
    assert {journal.count(f"start {name}") for name in ("deaf", "gateway")} == {1}
