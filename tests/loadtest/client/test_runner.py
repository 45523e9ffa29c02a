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


def has_gone_round(run: ArmRun) -> bool:
    """Return whether each stream of the backlog has asked again."""
    return len(run.outcomes["backlog"]) > 6


async def test_a_backlog_is_cut_off_at_the_end_and_not_slow() -> None:
    async with FakeServer() as server:
        run = await run_arm(parse_target(server.url), [BACKLOG], ArmWindow(0.2, 0.0), seed=1, round_=0)
    assert all(o.given_up_s is None for o in run.outcomes["backlog"])


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
