"""Progress of commands: a line on a terminal, and nothing elsewhere."""

import re
from pathlib import Path

import pytest

from tests.terminal import stderr_of

PROGRAM = """
from loadtest.progress import ShownStart, progress
from loadtest.running import print_progress
with progress("everything"):
    with progress("rounds", 4) as show:
        show(1)
        print_progress("round 1: fast")
    with ShownStart().phase("loading the model") as phase:
        phase.show(1, 4)
"""


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_terminal_shows_how_far_the_work_is(on_terminal: bool, tmp_path: Path) -> None:
    text = stderr_of(PROGRAM, tmp_path, on_terminal=on_terminal)
    if not on_terminal:
        assert text == "round 1: fast\n"
        return
    shown = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
    for what in ("everything", "rounds", "loading the model"):
        assert any(re.search(rf"{what} +━.*\d:\d\d:\d\d left:", line) for line in shown), what
    assert "round 1: fast" in shown, "other lines are not in those of progress"
