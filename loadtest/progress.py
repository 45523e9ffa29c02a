"""On a terminal: how far a command is, its elapsed and its expected time. Elsewhere, nothing of it is shown."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.progress import Phase

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

REFRESHES_PER_S = 2  # drawing takes time from what is measured
SPEED_S = 3600.0  # seconds of the past from which the rest is estimated: a part may take minutes

_bars: "Bars | None" = None  # those on the terminal; there can be only one group of them at a time


@contextmanager
def progress(what: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Show a line for the work in the block. Yield a function that is told how much of `total` is done by now.

    Without a `total`, only the elapsed time is shown. Lines that are printed to stderr meanwhile come above it.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    with _shown() as bars:
        task = bars.add_task(what, total=total)
        try:
            yield lambda done: bars.update(task, completed=done)
        finally:
            bars.remove_task(task)


@contextmanager
def _shown() -> "Iterator[Bars]":
    global _bars
    if _bars is not None:
        yield _bars
        return
    # Imported here, because only a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    bars = Progress(
        *columns,
        console=Console(file=sys.stderr),
        transient=True,
        refresh_per_second=REFRESHES_PER_S,
        speed_estimate_period=SPEED_S,
        redirect_stdout=sys.stdout.isatty(),  # what goes elsewhere must not go to the terminal
    )
    _bars = bars
    try:
        with bars:
            yield bars
    finally:
        _bars = None


class ShownStart:
    """Shows the phases of an engine's start. Implements `engine.progress.Progress`."""

    @contextmanager
    def phase(self, name: str, *, draws_itself: bool = False) -> Iterator[Phase]:
        with progress(name, total=1) as show:
            yield _ShownPhase(show)


class _ShownPhase:
    def __init__(self, show: Callable[[float], None]) -> None:
        self._show = show

    def show(self, done: int, total: int) -> None:
        self._show(done / total if total else 0)
