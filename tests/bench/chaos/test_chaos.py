"""The command `chaos`: its plan, its proxy, its clocks, and a verdict that can fail."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from bench.chaos.batches import BatchWork, judge_lines
from bench.chaos.clock import Clocks
from bench.chaos.disk import Disks
from bench.chaos.faults import KINDS, Fault, planned_faults
from bench.chaos.job import JobComparison, compared, job_lines
from bench.chaos.link import Link
from bench.chaos.load import LOST, Answer
from bench.chaos.report import RECOVERY_LIMIT_S, ChaosRun, chaos_record
from bench.chaos.site import with_all_preloaded
from scheduler.store.connection import connect
from scheduler.store.durability import durable
from scheduler.store.errors import NotDurable
from tests.waiting import until
from tidegate.valkey import running_valkey

GATEWAYS = ("gateway-1", "gateway-2")
KILL = Fault("kill", "gateway-1", began_s=10.0, ended_s=10.0)
NONCES = ["aaaa-1111", "bbbb-2222"]
ROUND = 16  # faults


def line(number: int, text: str) -> dict[str, object]:
    body = {"choices": [{"message": {"content": text}}]}
    return {"custom_id": f"line-{number}", "response": {"body": body}}


def right(kind: str, gateway: str, began_s: float) -> Answer:
    return Answer(kind, gateway, began_s, began_s + 0.5, is_right=True)


def good_run() -> ChaosRun:
    kinds = ("stream", "long stream", "chat", "background")
    answers = [right(kind, gateway, s) for kind in kinds for gateway in GATEWAYS for s in (1.0, 12.0)]
    return ChaosRun([KILL], answers, [BatchWork(NONCES, "batch_1", problem="")], {}, GATEWAYS, seed=0)


def with_answer(answer: Answer) -> ChaosRun:
    return replace(good_run(), answers=[*good_run().answers, answer])


def test_a_good_run_has_no_problems_and_a_record() -> None:
    run = good_run()
    assert run.problems() == []
    assert run.recovery_s(KILL) == 2.5
    assert chaos_record(run).data["passed"] is True


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (with_answer(Answer("chat", "gateway-1", 1.0, 2.0, problem="wrong: 'x' instead of 'y'")), "wrong"),
        (with_answer(Answer("chat", "gateway-2", 9.0, 10.5, error=LOST)), "its connection broke"),
        (replace(good_run(), batches=[BatchWork(NONCES, "batch_1", "line-0 is there twice")]), "twice"),
        (replace(good_run(), leftovers={"requests": "leased [b'r1']"}), "left over, requests"),
        (replace(good_run(), answers=[a for a in good_run().answers if a.kind != "chat"]), "no chat was answered"),
        (replace(good_run(), answers=[a for a in good_run().answers if a.began_s < 5]), "has answered nothing since"),
        (replace(good_run(), faults=[]), "no fault"),
        (replace(with_answer(Answer("chat", "gateway-1", 1.0, 2.0, error="overloaded")), is_calm=True), "in peace"),
        (replace(good_run(), batches=[]), "no batch"),
    ],
)
def test_whatever_breaks_a_promise_is_a_problem(run: ChaosRun, problem: str) -> None:
    assert any(problem in found for found in run.problems())
    assert chaos_record(run).data["passed"] is False


def test_a_connection_to_a_killed_gateway_may_break_and_slow_recovery_may_not_be() -> None:
    assert with_answer(Answer("chat", "gateway-1", 9.0, 10.5, error=LOST)).problems() == []
    late = [right(a.kind, a.gateway, a.began_s + RECOVERY_LIMIT_S * (a.began_s > 5)) for a in good_run().answers]
    assert any("only after" in found for found in replace(good_run(), answers=late).problems())


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([line(0, NONCES[0]), line(1, NONCES[1])], ""),
        ([line(1, NONCES[1]), line(0, NONCES[0])], ""),
        ([line(0, NONCES[0])], "missing or wrong"),
        ([line(0, NONCES[0]), line(1, NONCES[0])], "missing or wrong"),
        ([line(0, NONCES[0]), line(1, NONCES[1]), line(1, NONCES[1])], "twice"),
        ([line(0, NONCES[0]), line(1, NONCES[1]), line(2, "more")], "3 are there"),
    ],
)
def test_each_line_of_a_batch_must_be_there_once_and_right(records: list[dict[str, object]], problem: str) -> None:
    found = judge_lines(NONCES, records)
    assert problem in found and bool(problem) == bool(found)


def test_a_job_under_faults_must_give_the_output_of_a_calm_one() -> None:
    calm = {"line-0": "a", "line-1": "b"}
    assert compared(calm, dict(calm), 2) == ""
    assert "1 lines are missing, 0 differ" in compared(calm, {"line-0": "a"}, 2)
    assert "0 lines are missing, 1 differ" in compared(calm, {"line-0": "a", "line-1": "x"}, 2)
    assert compared(calm, calm | {"line-2": "c"}, 2)
    assert "even in peace" in compared({"line-0": "a"}, calm, 2)
    assert "even in peace" in compared(calm | {"line-2": "c"}, calm | {"line-2": "c"}, 2)


def test_the_job_is_a_part_of_the_verdict_and_takes_the_place_of_the_batches() -> None:
    run = replace(good_run(), batches=[], job=JobComparison(2, 1.0, 2.0))
    assert run.problems() == [] and chaos_record(run).data["job"]["lines"] == 2
    worse = replace(run, job=JobComparison(2, 1.0, 2.0, "1 lines are missing"))
    assert worse.problems() == ["the job: 1 lines are missing"]


def test_the_lines_of_a_job_are_different_and_their_answers_are_certain() -> None:
    lines = job_lines(500, seed=3)
    assert lines == job_lines(500, seed=3)
    assert len({one["custom_id"] for one in lines}) == len({one["body"]["prompt"] for one in lines}) == 500
    assert all(one["body"]["temperature"] == 0 or "seed" in one["body"] for one in lines)


def test_a_seed_makes_the_same_faults_and_each_round_has_every_kind() -> None:
    first, again = (list(islice(planned_faults(7), 2 * ROUND)) for _ in range(2))
    assert first == again != list(islice(planned_faults(8), 2 * ROUND))
    assert {fault.kind for _, fault in first[:ROUND]} == {fault.kind for _, fault in first[ROUND:]} == set(KINDS)
    assert {fault.kind for _, fault in islice(planned_faults(7, ["kill", "cut"]), 20)} == {"kill", "cut"}


async def test_a_link_passes_on_delays_and_cuts(tmp_path: Path) -> None:
    at_store = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at_store.add(writer)
        while data := await reader.read(100):
            writer.write(data)
        writer.close()
        at_store.remove(writer)

    server = await asyncio.start_unix_server(echo, tmp_path / "store")
    async with server, Link(tmp_path / "store") as link, asyncio.timeout(30):
        port = int(link.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        link.delay_s = 0.05
        began_s = time.monotonic()
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        assert time.monotonic() - began_s >= 0.1
        link.cut()
        assert await ended(reader)
        refused, closing = await asyncio.open_connection("127.0.0.1", port)
        assert await ended(refused)
        link.mend()
        link.delay_s = 0.0
        mended, last = await asyncio.open_connection("127.0.0.1", port)
        last.write(b"pong")
        assert await mended.readexactly(4) == b"pong"
        for open_writer in (writer, closing, last):
            open_writer.close()
        await until(lambda: not at_store)


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


@pytest.mark.full
def test_a_clock_moves_for_one_process_and_its_monotonic_clock_stays(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    clocks.set("worker-1", -3600)
    program = "import time; from scheduler.clock import SystemClock; c = SystemClock(); print(c.wall_ms(), c.now())"
    env = clocks.env_of_python("worker-1")
    out = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    wall_ms, now_s = out.stdout.split()
    assert abs(int(wall_ms) / 1000 - (time.time() - 3600)) < 60
    assert abs(float(now_s) - time.monotonic()) < 60


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    disks = Disks(tmp_path)
    if disks.library is None:
        pytest.skip("no C compiler, or not Linux")
    return disks


# Syncs a file in the folder on a thread, and meanwhile writes to it and to another one elsewhere. Prints the times.
SYNCING = """
import os, sys, threading, time
ours, other = (os.open(f"{folder}/file", os.O_CREAT | os.O_WRONLY) for folder in sys.argv[1:])
syncing = threading.Thread(target=os.fdatasync, args=(ours,))
began = time.monotonic()
syncing.start()
while time.monotonic() < began + 0.05:  # the sync has begun
    time.sleep(0.01)
for file in (other, ours):
    os.write(file, b"x")
    print(time.monotonic() - began)
syncing.join()
print(time.monotonic() - began)
"""


FILLING = """
import sys
for folder in sys.argv[1:]:
    try:
        with open(f"{folder}/file", "wb") as file:
            file.write(b"x")
        print("written")
    except OSError as error:
        print(error.strerror)
"""


def run_on_disk(disks: Disks, tmp_path: Path, program: str) -> str:
    """Run `program` with a folder on the disk of `part`, and another one. Return what it prints."""
    folders = [tmp_path / name for name in ("data", "database")]
    for folder in folders:
        folder.mkdir()
    env, command = {**os.environ, **disks.env("part", folders[0])}, [sys.executable, "-c", program, *map(str, folders)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.full
def test_a_disk_is_slow_for_one_process_and_folder_and_writes_wait_for_a_sync(disks: Disks, tmp_path: Path) -> None:
    disks.set("part", sync_s=2.0)
    other_s, ours_s, sync_s = map(float, run_on_disk(disks, tmp_path, SYNCING).split())
    assert other_s < 2 <= ours_s and sync_s >= 2


@pytest.mark.full
def test_a_disk_is_full_for_one_process_and_folder(disks: Disks, tmp_path: Path) -> None:
    disks.set("part", is_full=True)
    assert run_on_disk(disks, tmp_path, FILLING).splitlines() == ["No space left on device", "written"]


@pytest.mark.full
async def test_a_store_with_a_slow_disk_confirms_no_write_in_time_and_goes_on_when_it_is_fast_again(
    disks: Disks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in disks.env("store", tmp_path / "store").items():
        monkeypatch.setenv(name, value)
    disks.set("store", sync_s=1.0)
    with running_valkey(tmp_path / "store") as url:
        async with connect(url) as client:
            await client.set("a", "1")
            with pytest.raises(NotDurable):
                await durable(client, timeout_s=0.5)
            assert await client.get("a") == b"1"
            disks.set("store")
            assert await durable(client, timeout_s=30.0)


def test_all_libraries_are_preloaded() -> None:
    merged = with_all_preloaded({"LD_PRELOAD": "a.so", "A": "1"}, {}, {"LD_PRELOAD": "b.so", "B": "2"})
    assert merged == {"LD_PRELOAD": "a.so:b.so", "A": "1", "B": "2"}
    assert with_all_preloaded({"A": "1"}) == {"A": "1"}
