"""One arm against a fake server: open loops are not slowed by answers, closed loops keep their streams."""

import asyncio

from loadtest.client.http import parse_target
from loadtest.client.runner import POLL_S, UNFINISHED, ArmRun, ArmWindow, run_arm
from loadtest.estimates import summarize
from loadtest.traffic.scenario import Lengths, TrafficClass
from loadtest.traffic.scenario_arrivals import ClosedLoop, OpenLoop
from tests.loadtest.fake_server import FakeServer

CHAT = TrafficClass(
    name="chat",
    role="interactive",
    service_tier="default",
    endpoint="chat",
    arrivals=OpenLoop(rate_per_s=60),
    prompt_tokens=Lengths(min=2, max=6),
    output_tokens=Lengths(min=2, max=4),
)
BACKLOG = TrafficClass(
    name="backlog",
    role="bulk",
    arrivals=ClosedLoop(streams=3),
    prompt_tokens=Lengths(min=2, max=6),
    output_tokens=Lengths(min=2, max=4),
    extra_body={"priority": 10},
)


async def test_an_arm_sends_its_plan_and_collects_every_answer() -> None:
    async with FakeServer() as server:
        run = await run_arm(parse_target(server.url), [CHAT], ArmWindow(0.5), seed=1, round_=0)
    chat = run.outcomes["chat"]
    assert len(chat) == len(server.requests) > 10
    assert all(o.is_complete and o.sent_s >= o.due_s for o in chat)
    assert [o.index for o in chat] == list(range(len(chat)))
    assert len(run.lag_s) == len(chat)


async def test_both_classes_run_together_and_the_backlog_leads() -> None:
    async with FakeServer() as server:
        window = ArmWindow(20.0, lead_s=1.0)
        run = await run_arm(parse_target(server.url), [CHAT, BACKLOG], window, 1, 0, should_stop=both_were_served)
    assert run.outcomes["chat"] and run.outcomes["backlog"]
    assert min(o.due_s for o in run.outcomes["backlog"]) < run.start_s
    assert {body.get("priority") for body in server.requests} == {None, 10}


def both_were_served(run: ArmRun) -> bool:
    chat, backlog = run.outcomes["chat"], run.outcomes["backlog"]
    return any(o.is_complete for o in chat) and any(o.tokens_between(run.start_s, run.end_s) for o in backlog)


async def test_arrivals_do_not_wait_for_a_server_that_never_answers() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        target = parse_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        run = await run_arm(target, [CHAT], ArmWindow(0.5, drain_s=0.0), seed=1, round_=0)
    async with FakeServer() as answering:
        same = await run_arm(parse_target(answering.url), [CHAT], ArmWindow(0.5), seed=1, round_=0)
    assert len(run.outcomes["chat"]) == len(same.outcomes["chat"])
    assert {o.error for o in run.outcomes["chat"]} == {UNFINISHED}
    waited = [o.ttft_s for o in run.outcomes["chat"]]
    assert all(w is not None and w >= run.end_s - o.due_s for w, o in zip(waited, run.outcomes["chat"], strict=True))
    summary = summarize([run], "chat")
    assert summary.unfinished == len(summary.ttft.samples) == len(summary.e2e.samples) == len(waited)


async def test_a_closed_loop_never_has_more_than_its_streams_in_flight() -> None:
    async with FakeServer() as server:
        window = ArmWindow(60.0, 0.0)
        run = await run_arm(parse_target(server.url), [BACKLOG], window, 1, 0, should_stop=has_gone_round)
    ends = [(o.finished_s, -1) for o in run.outcomes["backlog"] if o.finished_s is not None]
    starts = [(o.sent_s, 1) for o in run.outcomes["backlog"] if o.sent_s]
    level = peak = 0
    for _, change in sorted([*ends, *starts]):
        level += change
        peak = max(peak, level)
    assert 1 <= peak <= 3 and len(starts) > 3


async def test_with_a_limit_the_others_wait_in_the_client_and_their_times_say_so() -> None:
    async with FakeServer() as server:
        window = ArmWindow(0.3, 0.0, drains_closed_loops=True)
        run = await run_arm(parse_target(server.url), [BACKLOG], window, seed=1, round_=0, at_once=1)
    backlog = sorted(run.outcomes["backlog"], key=lambda o: o.sent_s)
    assert len(backlog) >= 3 and all(o.is_complete for o in backlog)
    for before, after in zip(backlog, backlog[1:], strict=False):
        assert before.finished_s is not None and before.finished_s <= after.sent_s
    third = backlog[2]  # all three were due at once
    assert third.ttft_s is not None and third.ttft_s > (backlog[1].finished_s or 0.0) - third.due_s > 0


async def test_answers_that_a_drain_waits_for_in_vain_count_with_what_they_have_waited() -> None:
    async with FakeServer(is_silent=lambda body: True) as server:
        window = ArmWindow(0.1, 0.0, drain_s=0.1, drains_closed_loops=True)
        run = await run_arm(parse_target(server.url), [BACKLOG], window, seed=1, round_=0)
    assert len(run.outcomes["backlog"]) == 3
    assert all(o.error == UNFINISHED and (o.ttft_s or 0.0) >= window.drain_s for o in run.outcomes["backlog"])


async def test_a_cancelled_arm_keeps_what_it_has_measured() -> None:
    runs: list[ArmRun] = []
    async with FakeServer(is_silent=lambda body: body["max_tokens"] == 4) as server:
        target, window = parse_target(server.url), ArmWindow(600.0, 0.0)
        arm = asyncio.create_task(run_arm(target, [CHAT, BACKLOG], window, 1, 0, on_start=runs.append))
        async with asyncio.timeout(30):
            while not (runs and any(o.is_complete for o in runs[0].outcomes["chat"])):
                await asyncio.sleep(0.01)
        arm.cancel()
        await asyncio.gather(arm, return_exceptions=True)
        assert arm.cancelled()
        assert [task for task in asyncio.all_tasks() if "client/runner.py" in repr(task)] == [], "nothing sends on"
    assert runs[0].was_cut and 0 < runs[0].duration_s < 600
    assert all(o.finished_s is not None or o.error for o in runs[0].outcomes["chat"])


def has_gone_round(run: ArmRun) -> bool:
    """Return whether each stream of the backlog has asked again."""
    return len(run.outcomes["backlog"]) > 6


async def test_a_failing_server_does_not_make_a_closed_loop_spin() -> None:
    async with FakeServer(status=lambda body: 503) as server:
        run = await run_arm(parse_target(server.url), [BACKLOG], ArmWindow(0.3, 0.0), seed=1, round_=0)
    assert len(server.requests) == 3
    assert all(o.status == 503 for o in run.outcomes["backlog"])


async def test_the_probe_is_read_at_both_ends_of_the_window() -> None:
    readings = iter([10.0, 10.25])

    async def probe() -> float:
        return next(readings)

    async with FakeServer() as server:
        run = await run_arm(parse_target(server.url), [CHAT], ArmWindow(0.2), 1, 0, probe)
    assert run.busy_s == 0.25


async def test_an_arm_that_has_shown_enough_sends_no_more_and_awaits_nothing() -> None:
    asked: list[int] = []

    def should_stop(run: ArmRun) -> bool:
        asked.append(sum(map(len, run.outcomes.values())))
        return asked[-1] >= 5

    async with FakeServer(is_silent=lambda body: True) as server:
        window = ArmWindow(60.0, drain_s=600.0)
        run = await run_arm(parse_target(server.url), [CHAT], window, 1, 0, should_stop=should_stop)
    chat = run.outcomes["chat"]
    assert run.was_cut and run.planned > 1000 and 5 <= len(chat) < 1000
    assert run.duration_s < 60.0 and all(o.due_s <= run.end_s + POLL_S for o in chat)
    assert all(o.error == UNFINISHED and o.given_up_s is not None for o in chat)
