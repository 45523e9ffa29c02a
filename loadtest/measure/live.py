"""The view of a measurement while it goes on: a live table on a terminal, and plain lines elsewhere.

Knows rich. The figures are those of the last seconds, so that a change shows at once and an update costs little.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadtest.client.answer import Outcome
from loadtest.client.runner import UNFINISHED, ArmRun
from loadtest.measure.rounds import Arm
from loadtest.reporting.formats import ABSENT, milliseconds

REFRESH_S, LINE_S = 0.5, 5.0  # seconds between two updates of the table, and between two plain lines
RECENT_S = 10.0  # seconds that rates and latencies of the view cover
COLUMNS = ("running", "waiting", "finished", "errors", "req/s", "tok/s", "TTFT p50", "p99", "ITL p50", "p99")
LAST_COLUMNS = ("E2E p50", "p99")


@dataclass(frozen=True, slots=True)
class Recent:
    """The state of a class now. Counts are since the beginning of the arm.

    Rates and latencies are of the last seconds; gaps between tokens are all those of requests that ran then.
    """

    running: int
    waiting: int  # for their turn in the client
    finished: int
    errors: int
    requests_per_s: float
    tokens_per_s: float
    ttft_s: list[float]
    itl_s: list[float]
    e2e_s: list[float]


def recent(outcomes: Sequence[Outcome], now_s: float, span_s: float, is_streamed: bool) -> Recent:
    """Return the state of a class at `now_s`. Rates and latencies are of the `span_s` seconds before."""
    since_s = now_s - span_s
    ended = [o for o in outcomes if o.is_complete]
    lately = [o for o in ended if (o.finished_s or 0.0) >= since_s]
    still_open = [o for o in outcomes if o.finished_s is None and o.error is None]
    active = [o for o in (*lately, *still_open) if o.progress]
    running = sum(o.sent_s > 0 for o in still_open)
    return Recent(
        running=running,
        waiting=len(still_open) - running,
        finished=len(ended),
        errors=sum(o.error not in (None, UNFINISHED) for o in outcomes),
        requests_per_s=len(lately) / span_s if span_s else 0.0,
        tokens_per_s=sum(o.tokens_between(since_s, now_s) for o in active) / span_s if span_s else 0.0,
        ttft_s=[o.ttft_s or 0.0 for o in active if o.progress[0][0] >= since_s] if is_streamed else [],
        itl_s=[gap for o in active for gap in o.inter_token_s()] if is_streamed else [],
        e2e_s=[o.e2e_s or 0.0 for o in lately],
    )


class LiveView:
    """Shows the run that is measured now: its arm, its phase, and the state of each class."""

    def __init__(self, console: Console, num_arms: int, rounds: int) -> None:
        self._console = console
        self._num_runs = num_arms * rounds
        self._rounds = rounds
        self._shown: tuple[Arm, ArmRun, int] | None = None
        self._begun = 0

    def show(self, arm: Arm, run: ArmRun, round_: int) -> None:
        self._shown = arm, run, round_
        self._begun += 1
        if not self._console.is_terminal:
            self._console.print(self._title(perf_counter()), soft_wrap=True)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Keep the view up to date while the block runs. What is on the screen stays there after it."""
        updates = asyncio.create_task(self._live() if self._console.is_terminal else self._lines())
        try:
            yield
        finally:
            updates.cancel()
            await asyncio.gather(updates, return_exceptions=True)

    async def _live(self) -> None:
        with Live(console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    live.update(self.render(perf_counter()), refresh=True)
                    await asyncio.sleep(REFRESH_S)
            finally:
                live.update(self.render(perf_counter()), refresh=True)

    async def _lines(self) -> None:
        while True:
            await asyncio.sleep(LINE_S)
            if self._shown is not None:
                self._console.print(self.line(perf_counter()), soft_wrap=True)

    def render(self, now_s: float) -> RenderableType:
        """Return the table as it is at `now_s`, a time of `perf_counter`."""
        if self._shown is None:
            return Text("The first arm begins.")
        arm, run, _ = self._shown
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("class", no_wrap=True)
        for name in (*COLUMNS, *LAST_COLUMNS):
            table.add_column(name, justify="right", no_wrap=True)
        for traffic in arm.classes:
            cells = _cells(self._recent(run, traffic.name, traffic.stream, now_s))
            table.add_row(Text(traffic.name, style="bold"), *cells)
        left = max(0.0, min(1.0, (now_s - run.start_s) / run.duration_s)) if run.duration_s else 1.0
        foot = f"ms and rates of the last {RECENT_S:.0f} s; Ctrl-C ends the measurement and reports it"
        bar = Bar(size=1.0, begin=0.0, end=left, width=40)
        return Group(Text(self._title(now_s), style="bold"), bar, table, Text(foot, style="dim"))

    def line(self, now_s: float) -> str:
        """Return the state at `now_s` as one line."""
        assert self._shown is not None, "called once an arm has begun"
        arm, run, _ = self._shown
        parts = []
        for traffic in arm.classes:
            now = self._recent(run, traffic.name, traffic.stream, now_s)
            parts.append(
                f"{traffic.name}: {now.running} running, {now.waiting} waiting, {now.finished} finished, "
                f"{now.errors} errors, {now.requests_per_s:.1f} req/s, {now.tokens_per_s:.0f} tok/s, "
                f"ms p50/p99: TTFT {_pair(now.ttft_s)}, ITL {_pair(now.itl_s)}, E2E {_pair(now.e2e_s)}"
            )
        return f"  {max(0.0, now_s - run.start_s):.0f} s  {'; '.join(parts)}"

    def _title(self, now_s: float) -> str:
        assert self._shown is not None, "called once an arm has begun"
        arm, run, round_ = self._shown
        phase = "warming up" if now_s < run.start_s else "measuring" if now_s < run.end_s else "measured"
        part = f"part {self._begun} of {self._num_runs}, " if self._num_runs > 1 else ""
        of = f", round {round_ + 1} of {self._rounds}" if self._rounds > 1 else ""
        return f"{part}{arm.name}{of}: {phase}, {run.duration_s:.0f} s"

    def _recent(self, run: ArmRun, name: str, is_streamed: bool, now_s: float) -> Recent:
        outcomes = run.outcomes[name]
        began_s = outcomes[0].due_s if outcomes else now_s
        return recent(outcomes, now_s, min(RECENT_S, max(0.0, now_s - began_s)), is_streamed)


def _cells(now: Recent) -> list[str]:
    counts = [str(n) for n in (now.running, now.waiting, now.finished)]
    errors = f"[bold red]{now.errors}[/]" if now.errors else "0"
    rates = [f"{now.requests_per_s:.1f}", f"{now.tokens_per_s:.0f}"]
    times = [_quantile(samples, q) for samples in (now.ttft_s, now.itl_s, now.e2e_s) for q in (0.5, 0.99)]
    return [*counts, errors, *rates, *times]


def _pair(samples: Sequence[float]) -> str:
    return f"{_quantile(samples, 0.5)}/{_quantile(samples, 0.99)}"


def _quantile(samples: Sequence[float], q: float) -> str:
    return milliseconds(float(np.quantile(samples, q))) if samples else ABSENT
