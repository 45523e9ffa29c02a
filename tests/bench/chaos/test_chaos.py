"""The command `chaos`: its plan, its proxy, its clocks, and a verdict that can fail."""

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from bench.chaos.clock import Clocks
from bench.chaos.faults import KINDS, Fault, planned_faults
from bench.chaos.link import Link
from bench.chaos.load import LOST, Answer, BatchWork, judge_lines
from bench.chaos.report import RECOVERY_LIMIT_S, ChaosRun, chaos_record
from tests.waiting import until

GATEWAYS = ("gateway-1", "gateway-2")
KILL = Fault("kill", "gateway-1", began_s=10.0, ended_s=10.0)
NONCES = ["aaaa-1111", "bbbb-2222"]


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


def test_a_seed_makes_the_same_faults_and_each_round_has_every_kind() -> None:
    first, again = (list(islice(planned_faults(7), 26)) for _ in range(2))
    assert first == again != list(islice(planned_faults(8), 26))
    assert {fault.kind for _, fault in first[:13]} == {fault.kind for _, fault in first[13:]} == set(KINDS)
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
    async with server, Link(tmp_path / "store") as link, asyncio.timeout(10):
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


def test_a_clock_moves_for_one_process_and_its_monotonic_clock_stays(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    clocks.set("worker-1", -3600)
    program = "import time; from scheduler.clock import SystemClock; c = SystemClock(); print(c.wall_ms(), c.now())"
    env = clocks.env_of_python("worker-1")
    out = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    wall_ms, now_s = out.stdout.split()
    assert abs(int(wall_ms) / 1000 - (time.time() - 3600)) < 60
    assert abs(float(now_s) - time.monotonic()) < 60
