"""`tidegate demo`, as a newcomer runs it, but shorter."""

import subprocess
import sys

import pytest

from tidegate.demo.fleet import MODELS

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def demo(*flags: str) -> str:
    """Return what the demo prints. Nothing in it may look like a fault."""
    argv = [sys.executable, "-m", "tidegate", "demo", "--seconds", "4", *flags]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


def test_chat_alone_and_beside_bulk() -> None:
    text = demo()
    assert "> What is Tidegate?" in text
    counts = [int(part.split()[0]) for part in text.split("(")[1:]]
    assert len(counts) == 2 and min(counts) > 0, "requests of both rows"


def test_a_fleet_loses_no_chat() -> None:
    rows = [line.split() for line in demo("--fleet").splitlines() if " ms" in line]
    assert len(rows) == 4 * len(MODELS)
    for row in rows:
        *_, num_chats, _, _, _, _, num_failed = row
        assert int(num_chats) > 0 and num_failed == "0", row
