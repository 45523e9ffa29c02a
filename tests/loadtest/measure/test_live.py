"""The view of a measurement while it goes on: its figures, its table and its plain lines."""

import asyncio
import io

import pytest
from rich.console import Console

from loadtest.client.answer import Outcome
from loadtest.measure import live
from loadtest.measure.live import LiveView, recent
from tests.loadtest.measure.builders import BULK, CHAT, answered, failed, measured


def shown(view: LiveView, now_s: float) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(view.render(now_s))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_rates_and_latencies_are_of_the_last_seconds() -> None:
    waiting = Outcome("interactive", 0, due_s=99.0)
    running = Outcome("interactive", 0, due_s=99.5, sent_s=99.5, progress=[(99.75, 1)])
    old, new = answered(50.0, ttft_s=5.0), answered(95.0, ttft_s=0.5)
    now = recent([old, new, failed(96.0, 503, "busy"), waiting, running], 100.0, 10.0, is_streamed=True)
    assert (now.running, now.waiting, now.finished, now.errors) == (1, 1, 2, 1)
    assert (now.requests_per_s, now.tokens_per_s) == (0.1, 0.5)
    assert (now.ttft_s, len(now.itl_s), len(now.e2e_s)) == ([0.5, 0.25], 3, 1)


def test_whole_answers_have_no_first_token() -> None:
    now = recent([answered(0.0)], 1.0, 10.0, is_streamed=False)
    assert (now.ttft_s, now.itl_s, len(now.e2e_s)) == ([], [], 1)


def test_the_table_has_a_row_for_each_class() -> None:
    measurement = measured("batching", [answered(0.0), answered(0.5, class_name="bulk")], classes=(CHAT, BULK))
    view = LiveView(Console(), num_arms=2, rounds=2)
    assert "begins" in shown(view, 0.0)
    view.show(measurement.arms[0], measurement.runs["batched"][0], 0)
    title, *_, header, interactive, bulk, foot = [line.split() for line in shown(view, 1.0).splitlines()]
    assert " ".join(title) == "part 1 of 4, batched, round 1 of 2: measuring, 2 s"
    assert header[:5] == ["class", "running", "waiting", "finished", "errors"] and header[-3:] == ["E2E", "p50", "p99"]
    assert interactive == ["interactive", "0", "0", "1", "0", "1.0", "4", "100", "100", "20", "20", "160", "160"]
    assert bulk[:5] == ["bulk", "0", "0", "1", "0"] and "Ctrl-C" in foot
    assert "warming up" in shown(view, -1.0) and "measured, 2 s" in shown(view, 3.0)


async def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    measurement = measured(None, [answered(0.0)])
    view = LiveView(Console(file=out, width=80), num_arms=1, rounds=1)
    monkeypatch.setattr(live, "LINE_S", 0.01)
    async with view.shown(), asyncio.timeout(30):
        view.show(measurement.arms[0], measurement.runs["load"][0], 0)
        assert out.getvalue() == "load: measured, 2 s\n"
        while "1 finished" not in out.getvalue():
            await asyncio.sleep(0.01)
    line = view.line(2.0)
    assert line.startswith("  2 s  interactive: 0 running, 0 waiting, 1 finished, 0 errors, 0.5 req/s, 2 tok/s")
    assert "TTFT 100/100, ITL 20/20, E2E 160/160" in line
